//! Turns the steps of a target into mounts, and removes them again.

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use nacre_bench_arguments::TablePlace;

use crate::buckets::{self, BucketSite, Store};
use crate::clock::{self, Deadline};
use crate::failure::{Doing, Failure};
use crate::holders::{self, Traffic};
use crate::images;
use crate::limits;
use crate::mounts;
use crate::options::{Plan, User};
use crate::pools;
use crate::programs;
use crate::scratch::Scratch;
use crate::target::{Bucket, BucketOf, Cage, Ground, Objects, Over, Pool, Step, Target, Union};
use crate::undo::{self, Effect};

/// Name of the image with a file system of the target's own, below the visit's directory.
const IMAGE: &str = "image";
/// Directory with the data that versions are made of, below the root of a file system.
pub const DATA: &str = "data";
/// Directory of an object store, below the visit's directory.
const STORE: &str = "store";
/// Directory below it with constant names for the devices of a pool on several devices.
const LINKS: &str = "links";
/// Limit of each device's reads and writes, bytes per second.
const LIMIT: u64 = 100_000_000;
/// Deadline for a mount to appear after its program returned, and for its end.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Made {
    step: Step,
    point: PathBuf,
    /// The loop devices, for steps with loop devices of ours.
    devices: Vec<PathBuf>,
    /// The daemon, for steps with one of ours.
    daemon: Option<Child>,
    /// Whether the step was completed.
    done: bool,
}

/// Resources of a step, which must be released with it.
#[derive(Debug, Default)]
struct Support {
    devices: Vec<PathBuf>,
    daemon: Option<Child>,
}

/// A request about snapshots and clones of a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    /// Makes a snapshot of this name; where there are none, a copy, with shared blocks if possible.
    Snapshot(String),
    /// Makes a clone of a snapshot.
    Clone {
        /// Name of the snapshot.
        of: String,
        /// Name of the new file system.
        name: String,
    },
    /// Destroys a clone.
    DestroyClone(String),
    /// Destroys a snapshot.
    DestroySnapshot(String),
}

/// A request about the devices of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverAsk {
    /// Reads this many bytes of each device, concurrently, bypassing the pool.
    Read(u64),
    /// Reads this many bytes of the first device alone, bypassing the pool.
    ReadOne(u64),
    /// Makes the first device ten times slower.
    Slow,
    /// Makes the first device as fast as the others again.
    Healthy,
    /// Takes the first device offline.
    Offline,
    /// Replaces the first device by another one.
    Replace,
    /// Scrubs the pool.
    Scrub,
    /// Adds the spare device: RAID-Z is expanded in the background, others get one more group.
    Join,
    /// Removes the first device, in the background.
    Leave,
    /// Waits for the end of the topology change.
    Shaped,
    /// Makes a file system with this record size.
    FileSystem(&'static str),
}

/// Directories in which the steps of a target begin.
#[derive(Debug)]
pub struct Start {
    /// Directory that the first step mounts; the lower branch of unions.
    pub ground: PathBuf,
    /// The upper branch of unions.
    pub upper: PathBuf,
    /// An empty directory next to it, for programs that need a work directory.
    pub work: PathBuf,
    /// Size of cages and images in bytes.
    pub limit: u64,
    /// Size of each of several devices in bytes.
    pub device: u64,
    /// Whether devices are limited.
    pub paced: bool,
}

/// A target that is mounted.
#[derive(Debug)]
pub struct Mounted<'a> {
    plan: &'a Plan,
    scratch: &'a Scratch,
    target: &'static Target,
    start: Start,
    made: Vec<Made>,
    root: PathBuf,
    /// The object store, which keeps running over cold starts.
    store: Option<Store>,
}

/// Programs that nacre can stand in for: linked under one of these names it acts as that program.
const RIVALS: [&str; 5] = ["bindfs", "mergerfs", "fuse-overlayfs", "zpool", "zfs"];

/// Returns why `target` cannot be measured on this machine at all, if so.
pub fn obstacle(target: &Target, plan: &Plan) -> Option<String> {
    let root = rustix::process::geteuid().is_root();
    if target.ground == Ground::FreshBtrfs && !root {
        return Some("a Btrfs beside the source needs root".to_owned());
    }
    let limits_devices = plan.tests.iter().any(|test| test.group.limits_devices());
    if limits_devices && target.pool().is_some_and(|pool| pool.over.is_some()) && root && !limits::are_there() {
        return Some("devices cannot be limited: there is no io controller of version 1".to_owned());
    }
    for step in target.steps {
        for name in step.programs() {
            match *name {
                "nacre" if !programs::is_executable(&plan.nacre) => {
                    return Some(format!("{} is not a program", plan.nacre.display()));
                }
                "nacre" => {}
                name => {
                    let Some(program) = programs::find(name) else { return Some(format!("{name} is not installed")) };
                    if RIVALS.contains(&name) && programs::is_nacre(&program) {
                        return Some(format!("{name} is nacre under that name, not a rival"));
                    }
                }
            }
        }
        if let Some(what) = step.of_root().filter(|_| !root || target.as_user) {
            return Some(format!("{what} need root"));
        }
    }
    if target.as_user && root && plan.user.is_none() {
        return Some("no ordinary user to run as (--user)".to_owned());
    }
    let needs_server = |step: &Step| matches!(step, Step::Bucket(bucket) if bucket.by != BucketOf::NacreInDirectory);
    if target.steps.iter().any(needs_server)
        && let Some(why) = buckets::obstacle()
    {
        return Some(why);
    }
    let through_fusermount = target.steps.iter().any(|step| step.is_fuse()) && (target.as_user || !root);
    (through_fusermount && programs::find("fusermount3").is_none()).then(|| "fusermount3 is not installed".to_owned())
}

/// Lists directories and reads attributes of their entries through a mount, as a user would, so that the mount
/// caches (and watches) them.
fn look_around(directory: &Path, depth: u32) -> Result<(), Failure> {
    for entry in fs::read_dir(directory).doing("listing", directory)? {
        let path = entry.doing("listing", directory)?.path();
        let data = fs::symlink_metadata(&path).doing("looking at", &path)?;
        if data.is_dir() && depth > 0 {
            look_around(&path, depth - 1)?;
        }
    }
    Ok(())
}

impl<'a> Mounted<'a> {
    /// Mounts `target`; on failure everything is removed again.
    pub fn mount(target: &'static Target, plan: &'a Plan, scratch: &'a Scratch, start: Start) -> Result<Self, Failure> {
        let root = start.ground.clone();
        let mut mounted = Self { plan, scratch, target, start, made: Vec::new(), root, store: None };
        match mounted.build() {
            Ok(()) => Ok(mounted),
            Err(failure) => Err(match mounted.dismount() {
                Ok(()) => failure,
                Err(second) => Failure::new(format!("{failure}; then {second}")),
            }),
        }
    }

    /// Returns the path at which the target shows the source.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Removes the target.
    pub fn dismount(&mut self) -> Result<(), Failure> {
        while let Some(made) = self.made.pop() {
            let step = made.step;
            self.take_away(made)?;
            if matches!(step, Step::Cage(..)) {
                self.forget()?;
            }
        }
        self.root.clone_from(&self.start.ground);
        Ok(())
    }

    /// Removes the target, empties the caches below it and mounts it again; returns how long the mount took.
    pub fn make_cold(&mut self) -> Result<Duration, Failure> {
        self.dismount()?;
        self.scratch.empty_caches()?;
        let start = clock::now();
        self.build()?;
        Ok(start.elapsed())
    }

    fn build(&mut self) -> Result<(), Failure> {
        let count = self.target.steps.len();
        if let (Some(Step::Bucket(bucket)), None) = (self.target.steps.last(), &self.store) {
            let (directory, delay) = (self.start.ground.join(STORE), Duration::from_millis(bucket.delay));
            self.store = Some(match bucket.by {
                BucketOf::NacreInDirectory => Store::directory(&directory)?,
                _ => Store::start(&directory, delay)?,
            });
        }
        for (index, step) in self.target.steps.iter().enumerate() {
            let point = match step {
                Step::Nodatacow => self.root.join("nodatacow"),
                Step::Subvolume => self.root.join("volume"),
                Step::Cage(Cage::Within, _) => self.root.clone(),
                _ => self.scratch.mount_point(self.target.id, count - 1 - index),
            };
            self.made.push(Made { step: *step, point: point.clone(), devices: Vec::new(), daemon: None, done: false });
            let Support { devices, daemon } = self.make(*step, &point)?;
            if let Some(made) = self.made.last_mut() {
                (made.devices, made.daemon, made.done) = (devices, daemon, true);
            }
            self.root = point;
        }
        if self.target.from_outside {
            look_around(&self.root, 2)?;
            self.root.clone_from(&self.start.ground);
        }
        Ok(())
    }

    /// Makes one step; returns its resources.
    fn make(&self, step: Step, point: &Path) -> Result<Support, Failure> {
        let nothing = |()| Support::default();
        if step == Step::Symlink {
            return symlink(&self.root, point).doing("linking", point).map(nothing);
        }
        if step == Step::Subvolume {
            return self.make_subvolume(point).map(nothing);
        }
        fs::create_dir_all(point).doing("creating", point)?;
        self.give_to_user(point)?;
        if step == Step::Nodatacow {
            return programs::run(Command::new("chattr").arg("+C").arg(point), &self.scratch.log())
                .map(drop)
                .map(nothing);
        }
        if let Step::Loop { kind, direct_io, options } = step {
            let device = self.make_loop(kind, direct_io, options, point)?;
            return Ok(Support { devices: vec![device], daemon: None });
        }
        if let Step::Pool(pool) = step {
            return self.make_pool(pool, point);
        }
        if let Step::Bucket(bucket) = step {
            self.scratch.undo().enter(Effect::Holders(self.local()))?;
            self.scratch.undo().enter(Effect::Mount(point.to_owned()))?;
            return self.in_bucket(bucket, point, |place| place.put_in_place()).map(nothing);
        }
        if point != self.root {
            self.scratch.undo().enter(Effect::Mount(point.to_owned()))?;
        }
        let mut command = match step {
            Step::Bind => {
                return rustix::mount::mount_bind(&self.root, point).doing("bind mounting", point).map(nothing);
            }
            Step::Bindfs => Command::new("bindfs"),
            Step::Union(by) => {
                let mut command = self.union(by);
                return self.launch(command.arg(point), Some(point)).map(nothing);
            }
            _ => Command::new(&self.plan.nacre),
        };
        match step {
            Step::Nacre(arguments) => drop(command.arg("mirror").args(arguments)),
            Step::Cage(_, arguments) => {
                command.arg("cage").arg("--size").arg(self.start.limit.to_string()).args(arguments);
            }
            _ => {}
        }
        match step {
            Step::Cage(Cage::Image, _) => drop(command.arg("--image").arg(self.root.join("image")).arg(point)),
            Step::Cage(Cage::Within, _) => drop(command.arg(point)),
            _ => drop(command.args(self.for_mounter_only()).arg(&self.root).arg(point)),
        }
        self.launch(&mut command, (point != self.root).then_some(point)).map(nothing)
    }

    /// Makes the command that mounts the two branches, without the mount point.
    fn union(&self, by: Union) -> Command {
        let (upper, lower, work) = (self.start.upper.display(), self.root.display(), self.start.work.display());
        let mut command = Command::new(by.program().map_or_else(|| self.plan.nacre.clone(), PathBuf::from));
        let overlay = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        match by {
            Union::Overlayfs => command.args(["-t", "overlay", "overlay", "-o", &overlay]),
            Union::FuseOverlayfs => command.args(["-o", &overlay]),
            // Creates on the first writable branch, as the others do.
            Union::Mergerfs => command.args(["-o", "category.create=ff", &format!("{upper}=RW:{lower}=RO")]),
            Union::UnionfsFuse => command.args(["-o", "cow", &format!("{upper}=RW:{lower}=RO")]),
            Union::Nacre(arguments) => {
                let branches = format!("{upper}=rw:{lower}=ro");
                command.arg("union").args(arguments).args(self.for_mounter_only()).arg(branches)
            }
        };
        command
    }

    fn make_subvolume(&self, point: &Path) -> Result<(), Failure> {
        let log = self.scratch.log();
        programs::run(Command::new("btrfs").args(["subvolume", "create"]).arg(point), &log)?;
        programs::run(Command::new("btrfs").args(["quota", "enable"]).arg(point), &log).map(drop)
    }

    /// Mounts a file system in an image of the present path, made there unless it exists already.
    fn make_loop(&self, kind: &'static str, direct_io: bool, options: &str, point: &Path) -> Result<PathBuf, Failure> {
        let (image, log, undo) = (self.root.join(IMAGE), self.scratch.log(), self.scratch.undo());
        if !image.exists() {
            // Other tables fill their images with data, not with names.
            let names =
                if self.plan.table.arguments.place == TablePlace::Images { self.plan.scale.names_in_one() } else { 0 };
            images::make(&image, kind, self.start.limit, names, &log)?;
        }
        let device = images::attach(&image, direct_io, undo, &log)?;
        let mounted = undo
            .enter(Effect::Mount(point.to_owned()))
            .and_then(|()| images::mount(&device, kind, options, point, &log));
        match mounted {
            Ok(()) => Ok(device),
            // The list of effects does not contain it, because the step failed.
            Err(failure) => {
                undo.strike(&Effect::Loop(device.clone()));
                Err(undo::release_loop(&device)
                    .err()
                    .map_or(failure.clone(), |second| Failure::new(format!("{failure}; then {second}"))))
            }
        }
    }

    /// Makes a pool in an image in the present path, or imports it again.
    fn make_pool(&self, pool: Pool, point: &Path) -> Result<Support, Failure> {
        let devices = pool.over.map_or(Ok(Vec::new()), |over| self.attach_devices(over))?;
        match self.make_pool_on(pool, point) {
            Ok(daemon) => Ok(Support { devices, daemon }),
            // The list of effects does not contain them, because the step failed.
            Err(failure) => Err(match self.release_devices(&devices) {
                Ok(()) => failure,
                Err(second) => Failure::new(format!("{failure}; then {second}")),
            }),
        }
    }

    /// Attaches the devices of a pool and a spare, made there unless they exist already, and limits them where
    /// times are measured; then checks that the limits hold.
    fn attach_devices(&self, over: Over) -> Result<Vec<PathBuf>, Failure> {
        let (links, log, undo) = (self.start.ground.join(LINKS), self.scratch.log(), self.scratch.undo());
        let fresh = !self.image().exists();
        fs::create_dir_all(&links).doing("creating", &links)?;
        let mut devices = Vec::new();
        for number in 0..over.devices + 1 {
            let (image, link) = (self.start.ground.join(format!("disk{number}")), self.link(number));
            if !image.exists() {
                images::sparse(&image, self.start.device)?;
            }
            let device = images::attach(&image, true, undo, &log)?;
            undo.enter(Effect::Limit(device.clone()))?;
            if self.start.paced {
                limits::set(&device, LIMIT)?;
            }
            match fs::remove_file(&link) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Failure::io("removing", &link, error));
                }
                _ => {}
            }
            symlink(&device, &link).doing("linking", &link)?;
            undo.enter(Effect::Holders(link))?;
            devices.push(device);
        }
        if fresh && self.start.paced {
            limits::prove(&devices, LIMIT)?;
        }
        Ok(devices)
    }

    /// Returns the constant name of a device.
    fn link(&self, number: usize) -> PathBuf {
        self.start.ground.join(LINKS).join(format!("disk{number}"))
    }

    fn release_devices(&self, devices: &[PathBuf]) -> Result<(), Failure> {
        for (number, device) in devices.iter().enumerate() {
            if self.start.paced {
                limits::set(device, 0)?;
            }
            undo::release_loop(device)?;
            for effect in
                [Effect::Limit(device.clone()), Effect::Loop(device.clone()), Effect::Holders(self.link(number))]
            {
                self.scratch.undo().strike(&effect);
            }
        }
        Ok(())
    }

    /// Carries out a request about the devices of the pool under test; returns how long it took.
    pub fn over(&self, ask: OverAsk) -> Result<Duration, Failure> {
        let Some((pool, over, made)) = self.made.last().and_then(|made| match made.step {
            Step::Pool(pool) => Some((pool, pool.over?, made)),
            _ => None,
        }) else {
            return Err(Failure::new("not a pool over devices"));
        };
        let first = made.devices.first().ok_or_else(|| Failure::new("a pool without devices"))?;
        match ask {
            OverAsk::Read(bytes) => {
                return limits::read(made.devices.get(..over.devices).unwrap_or_default(), bytes);
            }
            OverAsk::ReadOne(bytes) => return limits::read(std::slice::from_ref(first), bytes),
            _ => {}
        }
        let start = clock::now();
        self.pool(pool, &made.point, &self.image(), |place| match ask {
            OverAsk::Read(_) | OverAsk::ReadOne(_) => Ok(()),
            OverAsk::Slow => limits::set(first, LIMIT / 10),
            OverAsk::Healthy => limits::set(first, LIMIT),
            OverAsk::Offline => place.offline(),
            OverAsk::Replace => place.replace(),
            OverAsk::Scrub => place.scrub(),
            OverAsk::Join => place.join(over.parity > 0),
            OverAsk::Leave => place.let_leave(),
            OverAsk::Shaped => place.wait_for_shape(),
            OverAsk::FileSystem(record) => place.file_system(record),
        })?;
        Ok(start.elapsed())
    }

    /// Returns how many bytes of the devices are used by data and by metadata.
    pub fn over_used(&self) -> Result<(u64, u64), Failure> {
        match self.made.last().map(|made| (made.step, &made.point)) {
            Some((Step::Pool(pool), point)) if pool.can_be_degraded() => {
                self.pool(pool, point, &self.image(), |place| place.used())
            }
            // All copies count.
            Some((Step::Pool(pool), point)) => {
                let room = rustix::fs::statvfs(point).doing("asking for the free space of", point)?;
                let used = (room.f_blocks - room.f_bfree) * room.f_frsize;
                Ok((used * pool.over.map_or(1, |over| over.devices as u64 / over.data() as u64), 0))
            }
            _ => Err(Failure::new("not a pool over devices")),
        }
    }

    /// Asks the pool under test for a number of bytes.
    pub fn over_asked(&self, ask: impl FnOnce(&pools::PoolSite<'_>) -> Result<u64, Failure>) -> Result<u64, Failure> {
        match self.made.last().map(|made| (made.step, &made.point)) {
            Some((Step::Pool(pool), point)) => self.pool(pool, point, &self.image(), ask),
            _ => Err(Failure::new("not a pool over devices")),
        }
    }

    fn make_pool_on(&self, pool: Pool, point: &Path) -> Result<Option<Child>, Failure> {
        let (image, undo) = (self.root.join(IMAGE), self.scratch.undo());
        undo.enter(Effect::Holders(image.clone()))?;
        undo.enter(Effect::Mount(point.to_owned()))?;
        let daemon = self.pool(pool, point, &image, |place| {
            place.put_in_place(self.start.limit, |image| self.give_to_user(image))
        })?;
        if mounts::is_mounted(point)? {
            return Ok(daemon);
        }
        self.pool(pool, point, &image, |place| place.kill(daemon))?;
        Err(Failure::new(format!("the pool is there but nothing is mounted at {}", point.display())))
    }

    /// Calls `work` with a pool of this target.
    fn pool<T>(
        &self,
        pool: Pool,
        point: &Path,
        image: &Path,
        work: impl FnOnce(&pools::PoolSite<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let nacre = || {
            let mut command = Command::new(&self.plan.nacre);
            self.as_owner(&mut command)?;
            Ok(command)
        };
        let count = pool.over.map_or(0, |over| over.devices);
        let (devices, spare) = ((0..count).map(|number| self.link(number)).collect(), self.link(count));
        let (image, log) = (image.to_owned(), self.scratch.log());
        work(&pools::PoolSite { pool, image, devices, spare, point, log, nacre: &nacre })
    }

    /// Returns the directory with the local state of a file system in a bucket.
    fn local(&self) -> PathBuf {
        self.start.ground.join("local")
    }

    /// Calls `work` with a file system in a bucket.
    fn in_bucket<T>(
        &self,
        bucket: Bucket,
        point: &Path,
        work: impl FnOnce(&BucketSite<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let nacre = || {
            let mut command = Command::new(&self.plan.nacre);
            self.as_owner(&mut command)?;
            Ok(command)
        };
        let store = self.store.as_ref().ok_or_else(|| Failure::new("no object store was started"))?;
        work(&BucketSite { bucket, store, local: self.local(), point, log: self.scratch.log(), nacre: &nacre })
    }

    /// Puts or gets objects of the bucket.
    pub fn objects(&self, what: Objects) -> Result<Duration, Failure> {
        match self.made.last().map(|made| (made.step, &made.point)) {
            Some((Step::Bucket(bucket), point)) => self.in_bucket(bucket, point, |place| place.objects(what)),
            _ => Err(Failure::new("it lies in no bucket")),
        }
    }

    /// Returns the path of the last step's image, which is below the path that the step was added to.
    fn image(&self) -> PathBuf {
        self.start.ground.join(IMAGE)
    }

    /// Has the target write out its dirty data.
    pub fn settle(&self) -> Result<(), Failure> {
        match self.made.last().map(|made| (made.step, &made.point)) {
            Some((Step::Pool(pool), point)) => self.pool(pool, point, &self.image(), |place| place.settle()),
            Some((Step::Bucket(bucket), point)) => self.in_bucket(bucket, point, |place| place.settle()),
            _ => Ok(()),
        }
    }

    /// Returns the number of segment objects of the pool under test, if it is in a bucket.
    pub fn segments(&self) -> Result<Option<u64>, Failure> {
        let is_ours = matches!(self.target.steps.last(), Some(Step::Bucket(Bucket { by: BucketOf::Nacre, .. })));
        self.store.as_ref().filter(|_| is_ours).map(Store::segments).transpose()
    }

    /// Measures how long a reader of the pool under test needs to see a new file.
    pub fn follow(&self, name: &str) -> Result<Duration, Failure> {
        let Some((Step::Bucket(bucket), point)) = self.made.last().map(|made| (made.step, &made.point)) else {
            return Err(Failure::new("only pools in buckets have readers elsewhere"));
        };
        let mut elapsed = Duration::ZERO;
        self.in_bucket(bucket, point, |place| place.follow(name).map(|after| elapsed = after))?;
        Ok(elapsed)
    }

    /// Carries out a request about snapshots; returns how long it took.
    pub fn version(&self, version: &Version) -> Result<Duration, Failure> {
        let start = clock::now();
        match self.made.last().map(|made| (made.step, &made.point)) {
            Some((Step::Pool(pool), point)) => self.pool(pool, point, &self.image(), |place| match version {
                Version::Snapshot(name) => place.snapshot(name),
                Version::Clone { of, name } => place.clone_of(of, name),
                Version::DestroyClone(name) => place.destroy_clone(name),
                Version::DestroySnapshot(name) => place.destroy_snapshot(name),
            })?,
            Some((Step::Loop { kind: "btrfs", .. }, point)) => self.subvolume(point, version)?,
            _ => self.copied(version)?,
        }
        Ok(start.elapsed())
    }

    fn subvolume(&self, point: &Path, version: &Version) -> Result<(), Failure> {
        let mut command = Command::new("btrfs");
        let command = match version {
            Version::Snapshot(name) => command.args(["subvolume", "snapshot", "-r"]).arg(point).arg(point.join(name)),
            Version::Clone { of, name } => {
                command.args(["subvolume", "snapshot"]).arg(point.join(of)).arg(point.join(name))
            }
            Version::DestroyClone(name) | Version::DestroySnapshot(name) => {
                command.args(["subvolume", "delete"]).arg(point.join(name))
            }
        };
        programs::run(command, &self.scratch.log()).map(drop)
    }

    /// Copies the tree, as a user without snapshots does, with shared blocks where possible.
    fn copied(&self, version: &Version) -> Result<(), Failure> {
        let copy = |from: &str, to: &str| {
            let mut command = Command::new("cp");
            command.args(["-a", "--reflink=auto"]).arg(self.root.join(from)).arg(self.root.join(to));
            programs::run(&mut command, &self.scratch.log()).map(drop)
        };
        match version {
            Version::Snapshot(name) => copy(DATA, name),
            Version::Clone { of, name } => copy(of, name),
            Version::DestroyClone(name) | Version::DestroySnapshot(name) => {
                let path = self.root.join(name);
                fs::remove_dir_all(&path).doing("removing", &path)
            }
        }
    }

    /// Crashes the file system under test and mounts it again; returns how long the latter took.
    pub fn crash(&mut self) -> Result<Duration, Failure> {
        let Some(mut made) = self.made.pop() else { return Err(Failure::new("there is nothing that could crash")) };
        let elapsed = self.crash_of(&mut made);
        self.made.push(made);
        elapsed
    }

    fn crash_of(&self, made: &mut Made) -> Result<Duration, Failure> {
        let (image, log, point) = (self.image(), self.scratch.log(), made.point.clone());
        match (made.step, made.devices.first()) {
            (Step::Pool(pool), _) => {
                let daemon = made.daemon.take();
                self.pool(pool, &point, &image, |place| place.kill(daemon))?;
                let start = clock::now();
                made.daemon =
                    self.pool(pool, &point, &image, |place| place.put_in_place(self.start.limit, |_| Ok(())))?;
                Ok(start.elapsed())
            }
            (Step::Loop { kind, options, .. }, Some(device)) => {
                programs::run(Command::new("xfs_io").args(["-x", "-c", "shutdown"]).arg(&point), &log)?;
                mounts::unmount(&point, PATIENCE)?;
                let start = clock::now();
                images::mount(device, kind, options, &point, &log)?;
                Ok(start.elapsed())
            }
            _ => Err(Failure::new("only file systems in images are crashed")),
        }
    }

    /// Returns the peak memory of the daemon; `None` for file systems of the kernel.
    pub fn memory(&self) -> Result<Option<u64>, Failure> {
        holders::memory(&self.image())
    }

    /// Returns the bytes read and written by the devices of the last step, or by the processes that serve it; `None` if
    /// there are neither.
    pub fn traffic(&self) -> Result<Option<Traffic>, Failure> {
        match self.made.last() {
            Some(Made { step: Step::Bucket(_), .. }) => holders::traffic(&self.local()),
            Some(Made { devices, .. }) if !devices.is_empty() => holders::traffic_of_devices(devices).map(Some),
            _ => holders::traffic(&self.image()),
        }
    }

    /// Returns the option without which ordinary users cannot mount: they may use `allow_other` only where root has
    /// allowed it.
    fn for_mounter_only(&self) -> &'static [&'static str] {
        let root = rustix::process::geteuid().is_root() && self.user().is_none();
        if root { &[] } else { &["--no-allow-other"] }
    }

    fn give_to_user(&self, point: &Path) -> Result<(), Failure> {
        match self.user() {
            Some(user) => chown(point, Some(user.uid), Some(user.gid)).doing("giving away", point),
            None => Ok(()),
        }
    }

    /// Runs a program that mounts at `point`, if anywhere, and returns when the mount exists.
    fn launch(&self, command: &mut Command, point: Option<&Path>) -> Result<(), Failure> {
        self.as_owner(command)?;
        programs::run(command, &self.scratch.log())?;
        let Some(point) = point else { return Ok(()) };
        let (watch, deadline) = (mounts::Watch::start()?, Deadline::after(PATIENCE));
        while !mounts::is_mounted(point)? {
            if !watch.changed(deadline)? {
                let name = command.get_program().to_string_lossy().into_owned();
                return Err(Failure::new(format!("{name} returned but nothing is mounted at {}", point.display())));
            }
        }
        Ok(())
    }

    /// Returns the ordinary user that the target's programs run as, when we are root.
    fn user(&self) -> Option<User> {
        let root = rustix::process::geteuid().is_root();
        self.plan.user.filter(|_| self.target.as_user && root)
    }

    fn owner(&self) -> User {
        let own = User { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        self.user().unwrap_or(own)
    }

    fn as_owner(&self, command: &mut Command) -> Result<(), Failure> {
        let (user, owner) = (self.user(), self.owner());
        command.env("XDG_RUNTIME_DIR", self.scratch.run_directory(owner.uid, owner.gid)?);
        command.env("NACRE_STATE_DIR", self.scratch.state_directory(owner.uid, owner.gid)?);
        command.current_dir("/");
        if let Some(user) = user {
            command.uid(user.uid).gid(user.gid);
        }
        Ok(())
    }

    fn take_away(&self, mut made: Made) -> Result<(), Failure> {
        if made.step == Step::Symlink {
            return match fs::remove_file(&made.point) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                result => result.doing("removing", &made.point),
            };
        }
        match made.step {
            // It is a directory on the ground file system, and is removed with it.
            Step::Nodatacow => return Ok(()),
            Step::Subvolume => return self.take_subvolume(&made.point),
            Step::Nacre(_) | Step::Union(Union::Nacre(_)) | Step::Cage(Cage::Shown | Cage::Image, _)
                if mounts::is_mounted(&made.point)? =>
            {
                self.ask_to_unmount(&made.point)?
            }
            Step::Pool(pool) if made.done => {
                let (image, daemon) = (self.image(), made.daemon.take());
                self.pool(pool, &made.point, &image, |place| place.leave(daemon))?;
                self.scratch.undo().strike(&Effect::Holders(image));
            }
            Step::Bucket(bucket) if made.done => {
                self.in_bucket(bucket, &made.point, |place| place.leave())?;
                self.scratch.undo().strike(&Effect::Holders(self.local()));
            }
            Step::Cage(Cage::Within, _) => return if made.done { self.end(&made.point) } else { Ok(()) },
            _ => {}
        }
        mounts::unmount(&made.point, PATIENCE)?;
        self.scratch.undo().strike(&Effect::Mount(made.point.clone()));
        if matches!(made.step, Step::Pool(_)) {
            self.release_devices(&made.devices)?;
        } else if let Some(device) = made.devices.first() {
            undo::release_loop(device)?;
            self.scratch.undo().strike(&Effect::Loop(device.clone()));
        }
        match fs::remove_dir(&made.point) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => result.doing("removing", &made.point),
        }
    }

    fn ask_to_unmount(&self, point: &Path) -> Result<(), Failure> {
        // If it is refused (a user of the mount is still ending), the unmount is retried until a deadline.
        self.end(point).or_else(|failure| {
            mounts::unmount(point, PATIENCE).map_err(|second| Failure::new(format!("{failure}; then {second}")))
        })
    }

    fn end(&self, point: &Path) -> Result<(), Failure> {
        let mut command = Command::new(&self.plan.nacre);
        command.arg("umount").arg(point);
        self.as_owner(&mut command)?;
        programs::run(&mut command, &self.scratch.log()).map(drop)
    }

    /// Removes the saved accounts of cages: the next visit begins without them.
    fn forget(&self) -> Result<(), Failure> {
        let owner = self.owner();
        let state = self.scratch.state_directory(owner.uid, owner.gid)?;
        fs::remove_dir_all(&state).doing("removing", &state)
    }

    fn take_subvolume(&self, point: &Path) -> Result<(), Failure> {
        if !point.exists() {
            return Ok(());
        }
        let disabled = programs::run(Command::new("btrfs").args(["quota", "disable"]).arg(point), &self.scratch.log());
        fs::remove_dir_all(point).doing("removing", point)?;
        disabled.map(drop)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if let Err(failure) = self.dismount() {
            eprintln!("nacre bench: {failure}");
        }
    }
}
