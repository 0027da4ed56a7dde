//! Turns the steps of a target into mounts, and takes them away again.

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::{Doing, Failure};
use crate::images;
use crate::mounts;
use crate::options::{Plan, User};
use crate::programs;
use crate::scratch::Scratch;
use crate::target::{Cage, Ground, Step, Target, Union};
use crate::undo::{self, Effect};

/// How long a mount may take to appear after its program returned, and to go away.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Made {
    step: Step,
    point: PathBuf,
    /// The loop device, for steps that have one of ours.
    device: Option<PathBuf>,
    /// Whether it was finished.
    done: bool,
}

/// Where the steps of a target begin.
#[derive(Debug)]
pub struct Start {
    /// What the first step shows; the lower branch of unions.
    pub ground: PathBuf,
    /// The upper branch of unions.
    pub upper: PathBuf,
    /// An empty directory beside it for those who need one.
    pub work: PathBuf,
    /// Bytes that cages and images hold.
    pub limit: u64,
}

/// A target that is in place.
#[derive(Debug)]
pub struct Mounted<'a> {
    plan: &'a Plan,
    scratch: &'a Scratch,
    target: &'static Target,
    start: Start,
    made: Vec<Made>,
    root: PathBuf,
}

/// Why `target` cannot be measured on this machine at all, if so.
pub fn obstacle(target: &Target, plan: &Plan) -> Option<String> {
    let root = rustix::process::geteuid().is_root();
    if target.ground == Ground::FreshBtrfs && !root {
        return Some("a Btrfs beside the source needs root".to_owned());
    }
    for step in target.steps {
        for name in step.programs() {
            match *name {
                "nacre" if !programs::is_executable(&plan.nacre) => return Some(format!("{} is not a program", plan.nacre.display())),
                "nacre" => {}
                name if programs::find(name).is_none() => return Some(format!("{name} is not installed")),
                _ => {}
            }
        }
        if let Some(what) = step.of_root().filter(|_| !root || target.as_user) {
            return Some(format!("{what} need root"));
        }
    }
    if target.as_user && root && plan.user.is_none() {
        return Some("no ordinary user to run as (--user)".to_owned());
    }
    let through_fusermount = target.steps.iter().any(|step| step.is_fuse()) && (target.as_user || !root);
    (through_fusermount && programs::find("fusermount3").is_none()).then(|| "fusermount3 is not installed".to_owned())
}

/// Lists directories and looks at their entries through a mount, as a user of it would, so that it knows (and watches)
/// what is below.
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
    /// Puts `target` in place; on failure whatever was put in place is taken away again.
    pub fn mount(target: &'static Target, plan: &'a Plan, scratch: &'a Scratch, start: Start) -> Result<Self, Failure> {
        let root = start.ground.clone();
        let mut mounted = Self { plan, scratch, target, start, made: Vec::new(), root };
        match mounted.build() {
            Ok(()) => Ok(mounted),
            Err(failure) => Err(match mounted.dismount() {
                Ok(()) => failure,
                Err(second) => Failure::new(format!("{failure}; then {second}")),
            }),
        }
    }

    /// Where the target shows the source.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Takes the target away.
    pub fn dismount(&mut self) -> Result<(), Failure> {
        while let Some(made) = self.made.pop() {
            self.take_away(&made)?;
            if matches!(made.step, Step::Cage(..)) {
                self.forget()?;
            }
        }
        self.root.clone_from(&self.start.ground);
        Ok(())
    }

    /// Takes the target away, empties the caches below it and puts it in place again.
    pub fn make_cold(&mut self) -> Result<(), Failure> {
        self.dismount()?;
        self.scratch.empty_caches()?;
        self.build()
    }

    fn build(&mut self) -> Result<(), Failure> {
        let count = self.target.steps.len();
        for (index, step) in self.target.steps.iter().enumerate() {
            let point = match step {
                Step::Nodatacow => self.root.join("nodatacow"),
                Step::Subvolume => self.root.join("volume"),
                Step::Cage(Cage::Within, _) => self.root.clone(),
                _ => self.scratch.mount_point(self.target.id, count - 1 - index),
            };
            self.made.push(Made { step: *step, point: point.clone(), device: None, done: false });
            let device = self.make(*step, &point)?;
            if let Some(made) = self.made.last_mut() {
                (made.device, made.done) = (device, true);
            }
            self.root = point;
        }
        if self.target.from_outside {
            look_around(&self.root, 2)?;
            self.root.clone_from(&self.start.ground);
        }
        Ok(())
    }

    /// Makes one step; returns the loop device that it stands on, if it has one of ours.
    fn make(&self, step: Step, point: &Path) -> Result<Option<PathBuf>, Failure> {
        if step == Step::Symlink {
            return symlink(&self.root, point).doing("linking", point).map(|()| None);
        }
        if step == Step::Subvolume {
            return self.make_subvolume(point).map(|()| None);
        }
        fs::create_dir_all(point).doing("creating", point)?;
        self.give_to_user(point)?;
        if step == Step::Nodatacow {
            return programs::run(Command::new("chattr").arg("+C").arg(point), &self.scratch.log()).map(|_| None);
        }
        if let Step::Loop { kind, direct_io } = step {
            return self.make_loop(kind, direct_io, point).map(Some);
        }
        if point != self.root {
            self.scratch.undo().enter(Effect::Mount(point.to_owned()))?;
        }
        let mut command = match step {
            Step::Bind => return rustix::mount::mount_bind(&self.root, point).doing("bind mounting", point).map(|()| None),
            Step::Bindfs => Command::new("bindfs"),
            Step::Union(by) => {
                let mut command = self.union(by);
                return self.launch(command.arg(point), Some(point)).map(|()| None);
            }
            _ => Command::new(&self.plan.nacre),
        };
        match step {
            Step::Nacre(arguments) => drop(command.arg("mirror").args(arguments)),
            Step::Cage(_, arguments) => drop(command.arg("cage").arg("--size").arg(self.start.limit.to_string()).args(arguments)),
            _ => {}
        }
        match step {
            Step::Cage(Cage::Image, _) => drop(command.arg("--image").arg(self.root.join("image")).arg(point)),
            Step::Cage(Cage::Within, _) => drop(command.arg(point)),
            _ => drop(command.args(self.for_mounter_only()).arg(&self.root).arg(point)),
        }
        self.launch(&mut command, (point != self.root).then_some(point)).map(|()| None)
    }

    /// The program that shows the two branches, without the mount point.
    fn union(&self, by: Union) -> Command {
        let (upper, lower, work) = (self.start.upper.display(), self.root.display(), self.start.work.display());
        let mut command = Command::new(by.program().map_or_else(|| self.plan.nacre.clone(), PathBuf::from));
        let overlay = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        match by {
            Union::Overlayfs => command.args(["-t", "overlay", "overlay", "-o", &overlay]),
            Union::FuseOverlayfs => command.args(["-o", &overlay]),
            // Creates on the first branch that takes changes, as the others do.
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

    /// A file system of its own in an image in the path so far.
    fn make_loop(&self, kind: &'static str, direct_io: bool, point: &Path) -> Result<PathBuf, Failure> {
        let (image, log, undo) = (self.root.join("image"), self.scratch.log(), self.scratch.undo());
        images::make(&image, kind, self.start.limit, &log)?;
        let device = images::attach(&image, direct_io, undo, &log)?;
        let mounted = undo.enter(Effect::Mount(point.to_owned())).and_then(|()| images::mount(&device, kind, point, &log));
        match mounted {
            Ok(()) => Ok(device),
            // Nothing will take it away, because nothing was made.
            Err(failure) => {
                undo.strike(&Effect::Loop(device.clone()));
                Err(undo::release_loop(&device).err().map_or(failure.clone(), |second| Failure::new(format!("{failure}; then {second}"))))
            }
        }
    }

    /// Ordinary users may let others in only where root has allowed it, so they mount for themselves.
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

    /// Runs a program that mounts at `point`, if anywhere, and returns when it has done so.
    fn launch(&self, command: &mut Command, point: Option<&Path>) -> Result<(), Failure> {
        self.as_owner(command)?;
        programs::run(command, &self.scratch.log())?;
        let start = Instant::now();
        let Some(point) = point else { return Ok(()) };
        while !mounts::is_mounted(point)? {
            if start.elapsed() > PATIENCE {
                let name = command.get_program().to_string_lossy().into_owned();
                return Err(Failure::new(format!("{name} returned but nothing is mounted at {}", point.display())));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The ordinary user that the target's programs run as, when we are root.
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

    fn take_away(&self, made: &Made) -> Result<(), Failure> {
        if made.step == Step::Symlink {
            return match fs::remove_file(&made.point) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                result => result.doing("removing", &made.point),
            };
        }
        match made.step {
            // Lies on the ground, and goes with it.
            Step::Nodatacow => return Ok(()),
            Step::Subvolume => return self.take_subvolume(&made.point),
            Step::Nacre(_) | Step::Union(Union::Nacre(_)) | Step::Cage(Cage::Shown | Cage::Image, _)
                if mounts::is_mounted(&made.point)? =>
            {
                self.ask_to_unmount(&made.point)?
            }
            Step::Cage(Cage::Within, _) => return if made.done { self.end(&made.point) } else { Ok(()) },
            _ => {}
        }
        mounts::unmount(&made.point, PATIENCE)?;
        self.scratch.undo().strike(&Effect::Mount(made.point.clone()));
        if let Some(device) = &made.device {
            undo::release_loop(device)?;
            self.scratch.undo().strike(&Effect::Loop(device.clone()));
        }
        match fs::remove_dir(&made.point) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => result.doing("removing", &made.point),
        }
    }

    fn ask_to_unmount(&self, point: &Path) -> Result<(), Failure> {
        // Refusal (a user of the mount that is still leaving) is answered by patient unmounting.
        self.end(point)
            .or_else(|failure| mounts::unmount(point, PATIENCE).map_err(|second| Failure::new(format!("{failure}; then {second}"))))
    }

    fn end(&self, point: &Path) -> Result<(), Failure> {
        let mut command = Command::new(&self.plan.nacre);
        command.arg("umount").arg(point);
        self.as_owner(&mut command)?;
        programs::run(&mut command, &self.scratch.log()).map(drop)
    }

    /// Forgets what cages have saved: the next visit begins with nothing.
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
