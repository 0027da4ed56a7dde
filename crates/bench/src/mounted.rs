//! Turns the steps of a target into mounts, and takes them away again.

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::{Doing, Failure};
use crate::mounts;
use crate::options::{Plan, User};
use crate::programs;
use crate::scratch::Scratch;
use crate::target::{Step, Target};
use crate::undo::Effect;

/// How long a mount may take to appear after its program returned, and to go away.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Made {
    step: Step,
    point: PathBuf,
}

/// A target that is in place.
#[derive(Debug)]
pub struct Mounted<'a> {
    plan: &'a Plan,
    scratch: &'a Scratch,
    target: &'static Target,
    made: Vec<Made>,
    root: PathBuf,
}

/// Why `target` cannot be measured on this machine at all, if so.
pub fn obstacle(target: &Target, plan: &Plan) -> Option<String> {
    let root = rustix::process::geteuid().is_root();
    for step in target.steps {
        match step.program() {
            Some("nacre") if !programs::is_executable(&plan.nacre) => return Some(format!("{} is not a program", plan.nacre.display())),
            Some("nacre") | None => {}
            Some(name) if programs::find(name).is_none() => return Some(format!("{name} is not installed")),
            Some(_) => {}
        }
        if *step == Step::Bind && !root {
            return Some("bind mounts need root".to_owned());
        }
    }
    if target.as_user && root && plan.user.is_none() {
        return Some("no ordinary user to run as (--user)".to_owned());
    }
    let through_fusermount = target.steps.iter().any(|step| step.program().is_some()) && (target.as_user || !root);
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
    pub fn mount(target: &'static Target, plan: &'a Plan, scratch: &'a Scratch) -> Result<Self, Failure> {
        let mut mounted = Self { plan, scratch, target, made: Vec::new(), root: scratch.source().to_owned() };
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
        }
        self.root = self.scratch.source().to_owned();
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
            let point = self.scratch.mount_point(self.target.id, count - 1 - index);
            self.made.push(Made { step: *step, point: point.clone() });
            self.make(*step, &point)?;
            self.root = point;
        }
        if self.target.from_outside {
            look_around(&self.root, 2)?;
            self.root = self.scratch.source().to_owned();
        }
        Ok(())
    }

    fn make(&self, step: Step, point: &Path) -> Result<(), Failure> {
        if step == Step::Symlink {
            return symlink(&self.root, point).doing("linking", point);
        }
        fs::create_dir_all(point).doing("creating", point)?;
        self.give_to_user(point)?;
        self.scratch.undo().enter(Effect::Mount(point.to_owned()))?;
        match step {
            Step::Symlink => Ok(()),
            Step::Bind => rustix::mount::mount_bind(&self.root, point).doing("bind mounting", point),
            Step::Bindfs => {
                let mut command = Command::new("bindfs");
                command.args(self.for_mounter_only()).arg(&self.root).arg(point);
                self.start(&mut command, point)
            }
            Step::Nacre(arguments) => {
                let mut command = Command::new(&self.plan.nacre);
                command.arg("mirror").args(arguments).args(self.for_mounter_only()).arg(&self.root).arg(point);
                self.start(&mut command, point)
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

    /// Runs a program that mounts at `point` and returns when it has done so.
    fn start(&self, command: &mut Command, point: &Path) -> Result<(), Failure> {
        self.as_owner(command)?;
        programs::run(command, &self.scratch.log())?;
        let start = Instant::now();
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

    fn as_owner(&self, command: &mut Command) -> Result<(), Failure> {
        let own = User { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        let user = self.user();
        let owner = user.unwrap_or(own);
        command.env("XDG_RUNTIME_DIR", self.scratch.run_directory(owner.uid, owner.gid)?);
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
        if matches!(made.step, Step::Nacre(_)) && mounts::is_mounted(&made.point)? {
            let mut command = Command::new(&self.plan.nacre);
            command.arg("umount").arg(&made.point);
            self.as_owner(&mut command)?;
            // Refusal (a user of the mount that is still leaving) is answered by the patient unmounting below.
            if let Err(failure) = programs::run(&mut command, &self.scratch.log()) {
                mounts::unmount(&made.point, PATIENCE).map_err(|second| Failure::new(format!("{failure}; then {second}")))?;
            }
        }
        mounts::unmount(&made.point, PATIENCE)?;
        self.scratch.undo().strike(&Effect::Mount(made.point.clone()));
        match fs::remove_dir(&made.point) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => result.doing("removing", &made.point),
        }
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if let Err(failure) = self.dismount() {
            eprintln!("nacre bench: {failure}");
        }
    }
}
