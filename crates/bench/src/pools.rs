//! Pools in image files, of nacre and of zfs-fuse: made, left, found again, killed, and snapshots
//! of them. Both have the same verbs.
//!
//! Called by `mounted`. zfs-fuse serves all pools of a machine by one daemon with one socket, so it
//! is started for a visit and ended with it, and where another one runs already the target is left
//! out.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::clock::Deadline;
use crate::failure::{Doing, Failure};
use crate::holders;
use crate::images;
use crate::mounts;
use crate::programs;
use crate::target::{Pool, PoolOf};

/// Name of the pool: root's are one family on a machine, and two benches must not meet.
fn name() -> String {
    format!("nacre-bench-{}", std::process::id())
}

/// A snapshot that is made for the sake of what it waits for.
const SETTLED: &str = "settled";
/// How long zfs-fuse may take to answer its first command, and to end.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long it has between two questions whether it answers.
const ASKED_AGAIN: Duration = Duration::from_millis(5);

/// A pool of a visit: where it lies and where it is shown.
pub struct PoolSite<'a> {
    /// Whose, and how compressed.
    pub pool: Pool,
    /// The file that it is kept in.
    pub image: PathBuf,
    /// Where it is mounted.
    pub point: &'a Path,
    /// Output of the program run last.
    pub log: PathBuf,
    /// Makes a command of nacre's, for the right user and with its directories.
    pub nacre: &'a dyn Fn() -> Result<Command, Failure>,
}

impl PoolSite<'_> {
    /// `zpool` or `zfs`, or what nacre calls them.
    fn command(&self, verbs: &str) -> Result<Command, Failure> {
        match self.pool.by {
            // Of the same package as the daemon: others of that name speak to others.
            PoolOf::ZfsFuse => Ok(Command::new(zfs_fuse()?.with_file_name(verbs))),
            PoolOf::Nacre => {
                let mut command = (self.nacre)()?;
                command.arg(if verbs == "zpool" { "pool" } else { "fs" });
                Ok(command)
            }
        }
    }

    fn run(&self, verbs: &str, words: &[&str]) -> Result<(), Failure> {
        programs::run(self.command(verbs)?.args(words), &self.log).map(drop)
    }

    /// Makes the pool in a new sparse file, or finds it again if there is one. Returns its daemon,
    /// if it is a child of ours.
    pub fn put_in_place(
        &self,
        bytes: u64,
        own: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<Option<Child>, Failure> {
        let there = self.image.exists();
        if !there {
            images::sparse(&self.image, bytes)?;
            own(&self.image)?;
        }
        let daemon = match self.pool.by {
            PoolOf::ZfsFuse => Some(self.start_zfs_fuse()?),
            PoolOf::Nacre => None,
        };
        let directory = self.image.parent().unwrap_or(Path::new("/"));
        // zfs-fuse would otherwise find the pool again whenever it is started.
        let keep_no_list: &[&str] = if self.pool.by == PoolOf::ZfsFuse { &["-o", "cachefile=none"] } else { &[] };
        let mut command = self.command("zpool")?;
        if there {
            command.arg("import").args(keep_no_list).arg("-d").arg(directory).arg(name());
        } else {
            command
                .args(["create", "-f"])
                .args(keep_no_list)
                .args(["-O", &format!("compression={}", self.pool.compression)]);
            command.args(self.pool.also.iter().flat_map(|property| ["-O", property]));
            command.arg("-m").arg(self.point).arg(name()).arg(&self.image);
        }
        match programs::run(&mut command, &self.log) {
            Ok(_) => Ok(daemon),
            Err(failure) => {
                daemon.map_or(Ok(()), |daemon| self.end_daemon(daemon))?;
                Err(failure)
            }
        }
    }

    fn start_zfs_fuse(&self) -> Result<Child, Failure> {
        let failed = |error: std::io::Error| Failure::new(format!("starting zfs-fuse: {error}"));
        if self
            .command("zpool")?
            .arg("list")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(failed)?
            .success()
        {
            return Err(Failure::new("another zfs-fuse is running, and there can only be one"));
        }
        let log = self.log.with_extension("zfs-fuse");
        let output = File::create(&log).doing("creating", &log)?;
        let errors = output.try_clone().doing("sharing", &log)?;
        let mut command = Command::new("setpriv");
        // Must not outlive the bench, however that ends.
        command
            .args(["--pdeathsig", "KILL"])
            .arg(zfs_fuse()?)
            .args(["--no-daemon", "--no-kstat-mount"])
            .current_dir("/");
        let mut daemon = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().map_err(failed)?;
        let deadline = Deadline::after(PATIENCE);
        loop {
            let answer = self
                .command("zpool")?
                .arg("list")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .map_err(failed)?;
            if answer.success() {
                return Ok(daemon);
            }
            // It tells nobody when it answers, but ends where it cannot.
            let ended = Deadline::after(ASKED_AGAIN).wait_for_child(&mut daemon).map_err(failed)?;
            if ended.is_some() || deadline.is_over() {
                self.end_daemon(daemon)?;
                let said = std::fs::read_to_string(&log).doing("reading", &log)?;
                return Err(Failure::new(format!(
                    "zfs-fuse does not start: {}",
                    said.lines().last().unwrap_or("it says nothing")
                )));
            }
        }
    }

    fn end_daemon(&self, mut daemon: Child) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::new(format!("ending zfs-fuse: {error}"));
        let term =
            rustix::process::kill_process(rustix::process::Pid::from_child(&daemon), rustix::process::Signal::TERM);
        term.or_else(|error| if error == rustix::io::Errno::SRCH { Ok(()) } else { Err(failed(error.into())) })?;
        if Deadline::after(PATIENCE).wait_for_child(&mut daemon).map_err(failed)?.is_none() {
            daemon.kill().map_err(failed)?;
            daemon.wait().map_err(failed)?;
        }
        Ok(())
    }

    /// Leaves the pool in its file, with nobody who serves it.
    pub fn leave(&self, daemon: Option<Child>) -> Result<(), Failure> {
        let exported = self.run("zpool", &["export", &name()]);
        if exported.is_err() {
            // In the way of an orderly end stands what a killed one removes.
            return self.kill(daemon).and(exported);
        }
        daemon.map_or(Ok(()), |daemon| self.end_daemon(daemon))?;
        holders::kill(&self.image)?;
        mounts::unmount(self.point, PATIENCE)
    }

    /// Ends whoever serves the pool as a crash would, and takes away what is left of the mounts.
    pub fn kill(&self, daemon: Option<Child>) -> Result<(), Failure> {
        if let Some(mut daemon) = daemon {
            let failed = |error: std::io::Error| Failure::new(format!("killing zfs-fuse: {error}"));
            daemon.kill().map_err(failed)?;
            daemon.wait().map_err(failed)?;
        }
        holders::kill(&self.image)?;
        let points = mounts::below(self.point)?;
        points.iter().try_for_each(|point| mounts::detach(point))
    }

    /// Writes out what the daemon holds back. zfs-fuse has no word for that, but waits for it when
    /// it makes a snapshot.
    pub fn settle(&self) -> Result<(), Failure> {
        if self.pool.by == PoolOf::Nacre {
            return self.run("zpool", &["sync", &name()]);
        }
        self.snapshot(SETTLED)?;
        self.destroy_snapshot(SETTLED)
    }

    /// Makes a snapshot.
    pub fn snapshot(&self, name: &str) -> Result<(), Failure> {
        self.run("zfs", &["snapshot", &format!("{}@{name}", self::name())])
    }

    /// Makes a file system of a snapshot.
    pub fn clone_of(&self, snapshot: &str, name: &str) -> Result<(), Failure> {
        self.run("zfs", &["clone", &format!("{}@{snapshot}", self::name()), &format!("{}/{name}", self::name())])
    }

    /// Destroys a clone.
    pub fn destroy_clone(&self, name: &str) -> Result<(), Failure> {
        let deadline = Deadline::after(PATIENCE);
        loop {
            let destroyed = self.run("zfs", &["destroy", &format!("{}/{name}", self::name())]);
            // zfs-fuse calls what it has just mounted busy for a moment.
            if destroyed.is_ok() || self.pool.by != PoolOf::ZfsFuse || deadline.is_over() {
                return destroyed;
            }
            deadline.pause(Duration::from_millis(100));
        }
    }

    /// Destroys a snapshot.
    pub fn destroy_snapshot(&self, name: &str) -> Result<(), Failure> {
        self.run("zfs", &["destroy", &format!("{}@{name}", self::name())])
    }
}

fn zfs_fuse() -> Result<PathBuf, Failure> {
    programs::find("zfs-fuse").ok_or_else(|| Failure::new("zfs-fuse is not installed"))
}
