//! Pools in image files and on several devices, of nacre and of zfs-fuse: create, export, import, crash, snapshots.
//! Both have the same verbs. On several devices also Btrfs, which has others.
//!
//! Called by `mounted`. zfs-fuse serves all pools of a machine by one daemon with one socket, so it is started for
//! a visit and ended with it, and if another one runs already the target is left out.

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

/// Returns the name of the pool: root's pools share one name space, and two benches must not collide.
fn name() -> String {
    format!("nacre-bench-{}", std::process::id())
}

/// Name of a snapshot that is made only to wait for the write-out that it causes.
const SETTLED: &str = "settled";
/// Deadline for zfs-fuse to answer its first command, and to end.
const PATIENCE: Duration = Duration::from_secs(15);
/// Interval of polling whether it answers.
const ASKED_AGAIN: Duration = Duration::from_millis(5);

/// A pool of a visit, with its location and mount point.
pub struct PoolSite<'a> {
    /// Kind of pool, with its properties.
    pub pool: Pool,
    /// File with the pool.
    pub image: PathBuf,
    /// Devices of the pool, if it is not in the image; then the image only marks that it was made.
    pub devices: Vec<PathBuf>,
    /// A spare device.
    pub spare: PathBuf,
    /// Mount point.
    pub point: &'a Path,
    /// Output of the program run last.
    pub log: PathBuf,
    /// Makes a command of nacre, for the right user and with its directories.
    pub nacre: &'a dyn Fn() -> Result<Command, Failure>,
}

impl PoolSite<'_> {
    /// Makes a command of `zpool` or `zfs`, or of nacre's equivalents.
    fn command(&self, verbs: &str) -> Result<Command, Failure> {
        match self.pool.by {
            // From the package of the daemon: programs of this name from other packages do not talk to it.
            PoolOf::ZfsFuse => Ok(Command::new(zfs_fuse()?.with_file_name(verbs))),
            PoolOf::Btrfs => Err(Failure::new("Btrfs has other verbs")),
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

    /// Makes the pool in a new sparse file, or imports it if it exists. Returns its daemon, if it is a child of
    /// ours.
    pub fn put_in_place(
        &self,
        bytes: u64,
        own: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<Option<Child>, Failure> {
        let there = self.image.exists();
        if !there {
            images::sparse(&self.image, if self.devices.is_empty() { bytes } else { 0 })?;
            own(&self.image)?;
        }
        if self.pool.by == PoolOf::Btrfs {
            return self.put_btrfs_in_place(there).map(|()| None);
        }
        let daemon = match self.pool.by {
            PoolOf::ZfsFuse => Some(self.start_zfs_fuse()?),
            PoolOf::Nacre | PoolOf::Btrfs => None,
        };
        let place = self.devices.first().unwrap_or(&self.image);
        let directory = place.parent().unwrap_or(Path::new("/"));
        // Otherwise zfs-fuse would import the pool whenever it is started.
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
            command.arg("-m").arg(self.point).arg(name());
            match self.pool.over {
                Some(over) => command.args(Some(over.word).filter(|word| !word.is_empty())).args(&self.devices),
                None => command.arg(&self.image),
            };
        }
        match programs::run(&mut command, &self.log) {
            Ok(_) => Ok(daemon),
            Err(failure) => {
                daemon.map_or(Ok(()), |daemon| self.end_daemon(daemon))?;
                Err(failure)
            }
        }
    }

    fn put_btrfs_in_place(&self, there: bool) -> Result<(), Failure> {
        let word = self.pool.over.map_or("single", |over| over.word);
        if !there {
            let mut command = Command::new("mkfs.btrfs");
            command.args(["-q", "-f", "-d", word, "-m", word]).args(&self.devices);
            programs::run(&mut command, &self.log)?;
        }
        let options: Vec<String> = self.devices.iter().map(|device| format!("device={}", device.display())).collect();
        let Some(first) = self.devices.first() else { return Err(Failure::new("no devices")) };
        images::mount(first, "btrfs", &options.join(","), self.point, &self.log)
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
        // The daemon must not survive the bench, however that ends.
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
            // There is no notification when it answers, but it ends if it cannot start.
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

    /// Exports the pool and ends its daemon.
    pub fn leave(&self, daemon: Option<Child>) -> Result<(), Failure> {
        if self.pool.by == PoolOf::Btrfs {
            return mounts::unmount(self.point, PATIENCE);
        }
        let exported = self.run("zpool", &["export", &name()]);
        if exported.is_err() {
            // A crash removes what prevents an orderly end.
            return self.kill(daemon).and(exported);
        }
        daemon.map_or(Ok(()), |daemon| self.end_daemon(daemon))?;
        self.kill_holders()?;
        mounts::unmount(self.point, PATIENCE)
    }

    /// Kills the servers of the pool, as in a crash, and removes dead mounts.
    pub fn kill(&self, daemon: Option<Child>) -> Result<(), Failure> {
        if let Some(mut daemon) = daemon {
            let failed = |error: std::io::Error| Failure::new(format!("killing zfs-fuse: {error}"));
            daemon.kill().map_err(failed)?;
            daemon.wait().map_err(failed)?;
        }
        self.kill_holders()?;
        let points = mounts::below(self.point)?;
        points.iter().try_for_each(|point| mounts::detach(point))
    }

    fn kill_holders(&self) -> Result<(), Failure> {
        self.devices.iter().chain([&self.image]).try_for_each(|held| holders::kill(held))
    }

    /// Writes out dirty data. zfs-fuse has no command for that, but does it before it makes a snapshot.
    pub fn settle(&self) -> Result<(), Failure> {
        match self.pool.by {
            PoolOf::Btrfs => return self.btrfs(&["filesystem", "sync"], &[]),
            PoolOf::Nacre => return self.run("zpool", &["sync", &name()]),
            PoolOf::ZfsFuse => {}
        }
        self.snapshot(SETTLED)?;
        self.destroy_snapshot(SETTLED)
    }

    /// Makes a snapshot.
    pub fn snapshot(&self, name: &str) -> Result<(), Failure> {
        self.run("zfs", &["snapshot", &format!("{}@{name}", self::name())])
    }

    /// Makes a clone of a snapshot.
    pub fn clone_of(&self, snapshot: &str, name: &str) -> Result<(), Failure> {
        self.run("zfs", &["clone", &format!("{}@{snapshot}", self::name()), &format!("{}/{name}", self::name())])
    }

    /// Destroys a clone.
    pub fn destroy_clone(&self, name: &str) -> Result<(), Failure> {
        let deadline = Deadline::after(PATIENCE);
        loop {
            let destroyed = self.run("zfs", &["destroy", &format!("{}/{name}", self::name())]);
            // zfs-fuse reports a file system as busy for a moment after it is mounted.
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

impl PoolSite<'_> {
    /// Runs a command of Btrfs on the mounted file system.
    fn btrfs(&self, words: &[&str], before: &[&Path]) -> Result<(), Failure> {
        programs::run(Command::new("btrfs").args(words).args(before).arg(self.point), &self.log).map(drop)
    }

    fn first(&self) -> Result<&Path, Failure> {
        self.devices.first().map(PathBuf::as_path).ok_or_else(|| Failure::new("not a pool over devices"))
    }

    /// Takes the first device offline.
    pub fn offline(&self) -> Result<(), Failure> {
        let device = self.first()?.display().to_string();
        self.run("zpool", &["offline", &name(), &device])
    }

    /// Scrubs the pool, and waits for the end.
    pub fn scrub(&self) -> Result<(), Failure> {
        match self.pool.by {
            PoolOf::Btrfs => self.btrfs(&["scrub", "start", "-B"], &[]),
            PoolOf::Nacre => self.run("zpool", &["scrub", "-w", &name()]),
            PoolOf::ZfsFuse => self.run("zpool", &["scrub", &name()]).and_then(|()| self.wait_for_zfs_fuse()),
        }
    }

    /// Replaces the first device by the spare, and waits for the end of the resilver.
    pub fn replace(&self) -> Result<(), Failure> {
        let (old, new) = (self.first()?.display().to_string(), self.spare.display().to_string());
        match self.pool.by {
            PoolOf::Btrfs => self.btrfs(&["replace", "start", "-B", "-f", "1"], &[&self.spare]),
            PoolOf::Nacre => self.run("zpool", &["replace", "-f", "-w", &name(), &old, &new]),
            PoolOf::ZfsFuse => {
                self.run("zpool", &["replace", "-f", &name(), &old, &new]).and_then(|()| self.wait_for_zfs_fuse())
            }
        }
    }

    /// Expands a RAID-Z group by the spare device, in the background, or adds the spare as a group of its own.
    pub fn join(&self, rows: bool) -> Result<(), Failure> {
        let (name, new) = (name(), self.spare.display().to_string());
        match (rows, self.pool.over) {
            (true, Some(over)) => self.run("zpool", &["attach", "-f", &name, &format!("{}-0", over.word), &new]),
            _ => self.run("zpool", &["add", "-f", &name, &new]),
        }
    }

    /// Removes the first device, in the background.
    pub fn let_leave(&self) -> Result<(), Failure> {
        let device = self.first()?.display().to_string();
        self.run("zpool", &["remove", &name(), &device])
    }

    /// Waits for the end of a topology change.
    pub fn wait_for_shape(&self) -> Result<(), Failure> {
        self.run("zpool", &["wait", "-t", "remove,raidz_expand", &name()])
    }

    /// Returns the bytes moved by the last topology change.
    pub fn moved(&self) -> Result<u64, Failure> {
        let said = programs::run(self.command("zpool")?.args(["status", "-jp", &name()]), &self.log)?;
        of_status(&said, &name()).ok_or_else(|| Failure::new("no change of shape in what 'pool status' says"))
    }

    /// Returns the bytes allocated on the first device, where each is a group of its own.
    pub fn share(&self) -> Result<u64, Failure> {
        let said =
            programs::run(self.command("zpool")?.args(["list", "-Hpv", "-o", "name,alloc", &name()]), &self.log)?;
        // The first line is the pool.
        let share = said.lines().nth(1).and_then(|line| line.split('\t').nth(1)).and_then(|share| share.parse().ok());
        share.ok_or_else(|| Failure::new(format!("no device in '{said}'")))
    }

    /// Polls zfs-fuse, which does not notify of the end of a scrub or resilver.
    fn wait_for_zfs_fuse(&self) -> Result<(), Failure> {
        let deadline = Deadline::after(programs::SETUP_PATIENCE);
        loop {
            let said = programs::run(self.command("zpool")?.args(["status", &name()]), &self.log)?;
            if !said.contains("in progress") {
                return Ok(());
            }
            if deadline.is_over() {
                return Err(Failure::new("zfs-fuse does not come to an end with its devices"));
            }
            deadline.pause(Duration::from_millis(20));
        }
    }

    /// Makes a file system with this record size.
    pub fn file_system(&self, record: &str) -> Result<(), Failure> {
        let name = format!("{}/{record}", self::name());
        self.run("zfs", &["create", "-o", &format!("recordsize={record}"), &name])
    }

    /// Returns the bytes of the devices used by data and by metadata; zfs-fuse reports only the sum.
    pub fn used(&self) -> Result<(u64, u64), Failure> {
        let parity = self.pool.over.map_or(0, |over| over.parity);
        let mut command = self.command("zpool")?;
        match self.pool.by {
            PoolOf::Nacre => {
                let said = programs::run(command.args(["inspect", "--segments", &name()]), &self.log)?;
                Ok(of_segments(&said, parity))
            }
            _ => {
                let said = programs::run(command.args(["list", "-H", "-o", "alloc", &name()]), &self.log)?;
                Ok((human(&said).ok_or_else(|| Failure::new(format!("'{said}' is no size")))?, 0))
            }
        }
    }
}

/// Returns the bytes moved by a topology change, from `pool status`, if it has finished.
fn of_status(text: &str, name: &str) -> Option<u64> {
    let status: serde_json::Value = serde_json::from_str(text).ok()?;
    let change = status.get("pools")?.get(name)?.get("reshape")?;
    let is_over = change.get("state")?.as_str()? == "FINISHED";
    change.get("moved")?.as_str()?.parse().ok().filter(|_| is_over)
}

/// Adds up the lines of `pool inspect --segments`: bytes of data and of everything else on the devices of a group
/// with this parity.
fn of_segments(text: &str, parity: usize) -> (u64, u64) {
    let mut sums = (0, 0);
    for line in text.lines() {
        let Some((_, rest)) = line.split_once(": ").filter(|_| line.starts_with("segment ")) else { continue };
        let stream = rest.split(' ').next().unwrap_or_default();
        let columns = rest
            .split("at ")
            .nth(1)
            .and_then(|place| place.split(' ').next())
            .map_or(0, |place| place.split(',').count());
        let alive = rest.split(" bytes alive").next().and_then(|before| before.rsplit(' ').next());
        let alive = alive.and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or(0);
        let (columns, data) = (columns as u64, columns.saturating_sub(parity).max(1) as u64);
        match stream {
            "Data" | "Survivors" => sums.0 += alive * columns / data,
            _ => sums.1 += alive * columns,
        }
    }
    sums
}

/// Parses a size in the format of `zpool`.
fn human(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, factor) = match text.char_indices().last()? {
        (at, 'K') => (text.get(..at)?, 1_u64 << 10),
        (at, 'M') => (text.get(..at)?, 1 << 20),
        (at, 'G') => (text.get(..at)?, 1 << 30),
        (at, 'T') => (text.get(..at)?, 1 << 40),
        _ => (text, 1),
    };
    number.parse::<f64>().ok().map(|number| (number * factor as f64) as u64)
}

fn zfs_fuse() -> Result<PathBuf, Failure> {
    programs::find("zfs-fuse").ok_or_else(|| Failure::new("zfs-fuse is not installed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_segments_take_is_told_by_their_streams() {
        let text = "segment 3: Data  at 0:1,1:2,2:3,3:4,4:5  sealed  9 frames in 900 bytes, 4 of 400 bytes alive here, 0 moved away  newest birth 7\n\
                    segment 4: Metadata  at 0:2,1:3  open  2 frames in 50 bytes, 2 of 50 bytes alive here, 0 moved away  newest birth 7\n\
                    segment 5: Data  at no place  dead since root 4  1 frames in 9 bytes, 0 of 0 bytes alive here, 0 moved away  newest birth 1";
        assert_eq!(of_segments(text, 1), (500, 100));
        let status = r#"{"pools":{"tank":{"reshape":{"state":"FINISHED","moved":"300"}}}}"#;
        assert_eq!(of_status(status, "tank"), Some(300));
        assert_eq!(of_status(&status.replace("FINISHED", "RUNNING"), "tank"), None);
        assert_eq!((human("1.50G\n"), human("512"), human("x")), (Some(3 << 29), Some(512), None));
    }
}
