//! Verbs on an imported pool. Create and import are carried out by the process that owns the pool.
//!
//! ```text
//!  figures     sizes, devices, counters          scrub    verification in the background
//!  properties  get, set                          damaged  names of damaged files
//!  devices     checks of new devices             check    full consistency check, slow
//!  inspect     dumps of on-disk data, as text    trim     trim by hand
//!  resilver    offline, online, replace, resilver
//!  shape       attach, detach, add, remove spares and logs
//!  changing    topology changes of groups        reshape  the job that moves segments for them
//! ```

pub mod changing;
pub mod check;
pub mod damaged;
pub mod devices;
pub mod figures;
pub mod in_bucket;
pub mod inspect;
pub(crate) mod kept_log;
pub(crate) mod kept_parts;
pub mod prices;
pub mod properties;
pub mod reshape;
pub mod resilver;
pub mod scrub;
pub mod shape;
pub mod signatures;
#[cfg(test)]
mod tests;
pub mod trim;

pub use changing::Intended;
pub use figures::{DeviceFigures, Figures, Follows, GroupFigures, Survives};
pub use reshape::{Reshape, ReshapeOrder, ReshapeReport, Reshaping};
pub use resilver::Resilver;
pub use scrub::{Extent, Phase, Scrub, ScrubOrder, ScrubReport};
pub use trim::{Trim, TrimOrder, TrimReport};

use std::path::PathBuf;
use std::time::Duration;

use nacre_pool::catalog::HistoryRow;
use nacre_pool::device::Device as _;
use serde::{Deserialize, Serialize};

use crate::watch::Event;
use crate::{Imported, Kind, Mounts, Progress, Refusal, fs};

/// Interval at which a waiting verb checks that its caller is still there.
const LOOK_UP: Duration = Duration::from_millis(500);

/// Limit of a line of the history, bytes; a character counts as four.
const HISTORY_LINE_MOST: usize = 7000;

/// A request on the pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoolRequest {
    /// Returns the pool's figures.
    List,
    /// Returns figures and health; with `names` also damaged files by name.
    Status {
        /// Includes the names of damaged files.
        names: bool,
    },
    /// Exports the pool; with `force` even while its mounts are in use.
    Export {
        /// Even while they are in use.
        force: bool,
    },
    /// Destroys the pool.
    Destroy {
        /// Even while its mounts are in use.
        force: bool,
    },
    /// Adds devices: single ones, or in groups and as spares.
    Add {
        /// Their paths.
        devices: Vec<PathBuf>,
        /// Kinds of the groups in their order, each with its number of devices: `mirror`, `raidz1`
        /// to `raidz3`, `plain` (single devices), then `special` and `special mirror` (for
        /// metadata), then `log` and `log mirror` (for the intent log alone), then `spare`. Empty:
        /// all are single devices.
        #[serde(default)]
        groups: Vec<(String, usize)>,
        /// Length of files that are made, bytes.
        size: Option<u64>,
        /// Accepts devices that hold other data.
        force: bool,
        /// Dry run: only checks whether they could be added.
        #[serde(default)]
        only_say: bool,
    },
    /// Takes devices offline.
    Offline {
        /// Their paths.
        devices: Vec<PathBuf>,
    },
    /// Brings devices back.
    Online {
        /// Their paths.
        devices: Vec<PathBuf>,
    },
    /// Replaces a device by another.
    Replace {
        /// Path of the old device.
        old: PathBuf,
        /// Path of the new device.
        new: PathBuf,
        /// Length of a file that is made, bytes.
        size: Option<u64>,
        /// Accepts a device that holds other data.
        force: bool,
    },
    /// Adds a device to a mirror as one more copy, or makes a mirror of a single device.
    Attach {
        /// Path of a device of the mirror, or of the single device.
        beside: PathBuf,
        /// Path of the new device.
        new: PathBuf,
        /// Length of a file that is made, bytes.
        size: Option<u64>,
        /// Accepts a device that holds other data.
        force: bool,
    },
    /// Detaches a device: one of a mirror; the new one of a replacement, which is cancelled; the
    /// old one, where the new one has everything; a spare that is in use.
    Detach {
        /// Its path.
        device: PathBuf,
    },
    /// Removes devices that hold no data: spares that are not in use, and log devices.
    Remove {
        /// Their paths, or the names of mirrors.
        devices: Vec<PathBuf>,
    },
    /// Removes devices or groups that hold data, after their segments were moved.
    Leave {
        /// Their paths, or the names of groups.
        devices: Vec<PathBuf>,
        /// Accepts a decrease of redundancy.
        force: bool,
    },
    /// Adds a device to a RAID-Z group (RAID-Z expansion).
    Widen {
        /// Name of the group.
        group: PathBuf,
        /// Path of the added device.
        new: PathBuf,
        /// Length of files that are made, bytes.
        size: Option<u64>,
        /// Accepts a device that holds other data.
        force: bool,
    },
    /// Converts a group to another kind.
    Convert {
        /// Name of the group.
        group: PathBuf,
        /// The new kind.
        to: String,
        /// Devices that are added to it.
        devices: Vec<PathBuf>,
        /// Length of files that are made, bytes.
        size: Option<u64>,
        /// Accepts a decrease of redundancy, and devices that hold other data.
        force: bool,
    },
    /// Moves segments from full devices to empty ones.
    Rebalance,
    /// Controls the topology change that is under way.
    Reshape(ReshapeOrder),
    /// Previews the result of a topology change, as notes.
    Plan {
        /// The intended change.
        intended: Intended,
        /// Prints sizes in bytes.
        exact: bool,
    },
    /// Waits for the end of a topology change, of this kind if one is given.
    AwaitReshape(Option<Reshaping>),
    /// Waits until no resilver runs.
    AwaitResilver,
    /// Uses the whole length of devices that have grown.
    Expand {
        /// Their paths; none: all.
        devices: Vec<PathBuf>,
    },
    /// Enables all features of this version that the pool does not have yet.
    Upgrade,
    /// Sets a property.
    Set {
        /// Name of the property.
        name: String,
        /// The value.
        value: String,
    },
    /// Returns the pool's history.
    History,
    /// Returns the events since the import; with `follow` also future ones, as notes, until the caller disconnects.
    Events {
        /// Waits for further events.
        follow: bool,
    },
    /// Clears the list of events.
    ClearEvents,
    /// Controls the scrub.
    Scrub(ScrubOrder),
    /// Waits for the end of the scrub.
    AwaitScrub,
    /// Controls trimming.
    Trim {
        /// Paths of the devices; none: all.
        devices: Vec<PathBuf>,
        /// The action.
        order: TrimOrder,
    },
    /// Waits for the end of trimming.
    AwaitTrim,
    /// Waits until the space of destroyed objects is free.
    AwaitFree,
    /// Clears errors and opens failed or absent devices again; of one device, if it is given.
    Clear {
        /// Its path.
        device: Option<PathBuf>,
    },
    /// Makes everything durable (`sync`).
    Sync,
    /// Dumps on-disk data, as notes.
    Inspect(inspect::Wanted),
    /// Checks the whole pool for consistency; errors are sent as notes.
    Check,
}

/// Answer to a [`PoolRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoolAnswer {
    /// It is done.
    Done,
    /// A suspended pool could not be destroyed: it is not imported any more, and is as at its last commit.
    NotDestroyed,
    /// Figures.
    Listed(Box<Figures>),
    /// Figures and health.
    Status(Box<Status>),
    /// The history, the oldest line first.
    History(Vec<Line>),
    /// The events, the oldest first.
    Events(Vec<Event>),
    /// Result of a check.
    Checked(check::CheckReport),
}

/// Figures and health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The figures.
    pub figures: Figures,
    /// The scrub.
    pub scrub: ScrubReport,
    /// The resilver.
    #[serde(default)]
    pub resilver: ScrubReport,
    /// The topology change.
    #[serde(default)]
    pub reshape: ReshapeReport,
    /// Number of damaged frames.
    pub damaged: u64,
    /// Names of damaged files, where they were asked for.
    pub names: Vec<String>,
}

/// A line of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Time of the command, seconds since 1970.
    pub at: i64,
    /// The transaction group after which it was done.
    pub txg: u64,
    /// The user who ran the command.
    pub uid: u32,
    /// Done by the pool itself.
    pub internal: bool,
    /// The machine.
    pub host: String,
    /// The command line, or the internal action.
    pub text: String,
}

impl PoolRequest {
    /// Whether it changes the pool: such requests run one at a time, and are entered in the history.
    #[must_use]
    pub fn changes(&self) -> bool {
        matches!(
            self,
            Self::Export { .. }
                | Self::Destroy { .. }
                | Self::Add { only_say: false, .. }
                | Self::Expand { .. }
                | Self::Offline { .. }
                | Self::Online { .. }
                | Self::Replace { .. }
                | Self::Attach { .. }
                | Self::Detach { .. }
                | Self::Remove { .. }
                | Self::Leave { .. }
                | Self::Widen { .. }
                | Self::Convert { .. }
                | Self::Rebalance
                | Self::Reshape(_)
                | Self::Upgrade
                | Self::Set { .. }
                | Self::Clear { .. }
                | Self::Scrub(_)
                | Self::Trim { .. }
        )
    }

    /// Devices that may become part of the pool, for requests that may change its set of devices.
    #[must_use]
    pub fn new_devices(&self) -> Option<Vec<PathBuf>> {
        match self {
            Self::Add { devices, only_say: false, .. } => Some(devices.clone()),
            Self::Replace { new, .. } | Self::Attach { new, .. } | Self::Widen { new, .. } => Some(vec![new.clone()]),
            Self::Convert { devices, .. } => Some(devices.clone()),
            Self::Detach { .. } | Self::Remove { .. } | Self::Leave { .. } => Some(Vec::new()),
            _ => None,
        }
    }

    /// Devices outside of the pool that the request may open (new ones, or ones taken offline).
    #[must_use]
    pub fn opened_devices(&self) -> Option<Vec<PathBuf>> {
        match self {
            Self::Online { devices } => Some(devices.clone()),
            _ => self.new_devices().filter(|devices| !devices.is_empty()),
        }
    }

    /// Verb phrase of requests that concern devices only; the pool's name follows it.
    fn of_devices(&self) -> Option<&'static str> {
        Some(match self {
            Self::Add { .. } => "add to",
            Self::Attach { .. } => "attach a device of",
            Self::Detach { .. } => "detach a device of",
            Self::Remove { .. } | Self::Leave { .. } => "remove a device of",
            Self::Widen { .. } | Self::Convert { .. } | Self::Rebalance | Self::Reshape(_) | Self::Plan { .. } => {
                "change the shape of"
            }
            Self::Offline { .. } => "take offline a device of",
            Self::Online { .. } => "bring online a device of",
            Self::Expand { .. } => "expand",
            Self::Replace { .. } => "replace a device of",
            Self::Trim { .. } => "trim",
            _ => return None,
        })
    }

    /// Whether the request ends the import of the pool.
    #[must_use]
    pub fn ends(&self) -> bool {
        matches!(self, Self::Export { .. } | Self::Destroy { .. })
    }
}

/// Carries out a request.
///
/// # Errors
/// Why it was not done.
pub fn run(
    pool: &Imported,
    mounts: &dyn Mounts,
    request: PoolRequest,
    progress: &mut dyn Progress,
) -> Result<PoolAnswer, Refusal> {
    let name = pool.name();
    if pool.bucket.is_some()
        && let Some(doing) = request.of_devices()
    {
        let what = format!("cannot {doing} '{name}': it lies in an object store, and has no devices");
        return Err(Refusal::new(Kind::Invalid, what));
    }
    match request {
        PoolRequest::List => return Ok(PoolAnswer::Listed(Box::new(Figures::of(pool)?))),
        PoolRequest::Status { names } => return Ok(PoolAnswer::Status(Box::new(status(pool, mounts, names)?))),
        PoolRequest::Export { force } => drop(leave(pool, mounts, force, "export")?),
        PoolRequest::Destroy { force } => return leave(pool, mounts, force, "destroy"),
        PoolRequest::Add { devices, groups, size, force, only_say } => {
            shape::add(pool, &devices, &groups, size, (force, only_say))?;
        }
        PoolRequest::Attach { beside, new, size, force } => shape::attach(pool, &beside, &new, size, force)?,
        PoolRequest::Detach { device } => shape::detach(pool, &device)?,
        PoolRequest::Remove { devices } => devices.iter().try_for_each(|path| shape::remove(pool, path))?,
        PoolRequest::Leave { devices, force } => changing::remove(pool, &devices, force, progress)?,
        PoolRequest::Widen { group, new, size, force } => {
            changing::widen(pool, &group, &new, (size, force), progress)?;
        }
        PoolRequest::Convert { group, to, devices, size, force } => {
            changing::convert(pool, &group, &to, (&devices, size, force), progress)?;
        }
        PoolRequest::Rebalance => changing::rebalance(pool, progress)?,
        PoolRequest::Reshape(order) => pool.reshape.order(&name, order)?,
        PoolRequest::Plan { intended, exact } => changing::plan(pool, &intended, exact, progress)?,
        PoolRequest::AwaitReshape(only) => changing::wait(pool, only, progress)?,
        PoolRequest::Offline { devices } => devices.iter().try_for_each(|path| resilver::offline(pool, path))?,
        PoolRequest::Online { devices } => devices.iter().try_for_each(|path| resilver::online(pool, path))?,
        PoolRequest::Replace { old, new, size, force } => resilver::replace(pool, &old, &new, size, force)?,
        PoolRequest::AwaitResilver => while pool.resilver.job.wait(LOOK_UP) && progress.note("") {},
        PoolRequest::Expand { devices } => expand(pool, &devices)?,
        PoolRequest::Upgrade => {
            let lacking = [
                (figures::REDUNDANT_METADATA, pool.store.has_redundant_metadata() || pool.bucket.is_some()),
                (figures::ORDERED_NAMES, pool.store.has_ordered_names()),
            ];
            let upgrade = || pool.store.upgrade(crate::clock::now());
            let upgraded = lacking.iter().any(|(_, there)| !there).then(upgrade).transpose();
            let upgraded = upgraded.map_err(|error| Refusal::pool(format!("cannot upgrade '{name}'"), &error))?;
            let upgraded = upgraded == Some(true);
            if upgraded {
                progress.note(&format!("Enabled the following features on '{name}':"));
                lacking.iter().filter(|(_, there)| !there).for_each(|(feature, _)| {
                    progress.note(&format!("  {feature}"));
                });
            } else {
                progress.note(&format!("Pool '{name}' already has all supported features enabled."));
            }
        }
        PoolRequest::Set { name, value } => properties::set(pool, &name, &value)?,
        PoolRequest::History => return history(pool).map(PoolAnswer::History),
        PoolRequest::Events { follow: false } => return Ok(PoolAnswer::Events(pool.watch.events(0))),
        PoolRequest::Events { follow: true } => follow(pool, progress)?,
        PoolRequest::ClearEvents => pool.watch.clear_events(),
        PoolRequest::Scrub(order) => pool.scrub.order(&name, order)?,
        PoolRequest::AwaitScrub => {
            while pool.scrub.job.wait(LOOK_UP) && progress.note("") {}
            pool.keep_damage()
                .map_err(|error| Refusal::pool(format!("cannot keep what was found in '{name}'"), &error))?;
        }
        PoolRequest::Trim { devices, order } => {
            writable(pool, &format!("cannot trim '{name}'"))?;
            pool.trim.order(&name, &devices, order)?;
        }
        PoolRequest::AwaitTrim => {
            while pool.trim.job.wait(LOOK_UP) && progress.note("") {}
            pool.trim.supported()?;
        }
        PoolRequest::AwaitFree => {
            while !pool.read_only && pool.pool.is_freeing() && progress.note("") {
                crate::clock::pause(LOOK_UP);
            }
        }
        PoolRequest::Clear { device } => {
            let meant = |path: &str| device.as_ref().is_none_or(|named| named.as_os_str() == path);
            let devices = pool.devices.read();
            if let Some(device) = device.as_ref().filter(|_| !devices.iter().any(|known| meant(known.name()))) {
                let refusal = Refusal::new(
                    Kind::NotFound,
                    format!("cannot clear errors for '{}': no such device in pool", device.display()),
                );
                return Err(refusal.next(format!("nacre pool status {name} lists them")));
            }
            if device.is_none() {
                pool.watch.clear_damage();
            }
            devices.iter().filter(|known| meant(known.name())).for_each(|known| known.clear_errors());
            drop(devices);
            pool.keep_damage().map_err(|error| Refusal::pool(format!("cannot clear errors for '{name}'"), &error))?;
            if !pool.read_only {
                resilver::reopen(pool, device.as_deref())?;
            }
        }
        PoolRequest::Sync => {
            let mounted: Vec<u64> = mounts.mounted().iter().map(|mounted| mounted.what.dataset).collect();
            mounts.settle(&mounted)?;
            if !pool.read_only {
                pool.pool.sync_pool().map_err(|error| Refusal::pool(format!("cannot sync '{name}'"), &error))?;
            }
        }
        PoolRequest::Inspect(wanted) => inspect::run(pool, &wanted, progress)?,
        PoolRequest::Check => return check::run(pool, progress).map(PoolAnswer::Checked),
    }
    Ok(PoolAnswer::Done)
}

/// Checks that an export loses nothing.
///
/// # Errors
/// The file of a device was deleted, and redundancy does not cover it; the next step names its rescue.
pub fn stays(pool: &Imported) -> Result<(), Refusal> {
    let deleted = || {
        let devices = pool.devices.read();
        devices.iter().find_map(|device| Some((device.name().to_owned(), device.deleted()?)))
    };
    let Some((device, open)) = deleted() else { return Ok(()) };
    let (name, figures) = (pool.name(), Figures::of(pool)?);
    let survives = |group: &GroupFigures| group.survives(&figures.devices);
    if !figures.groups.is_empty() && figures.groups.iter().all(survives) {
        return Ok(());
    }
    let what = format!(
        "cannot export '{name}': '{device}' was deleted: it is there as long as the pool is imported, and lost with the export"
    );
    Err(Refusal::new(Kind::Busy, what).next(rescue(&name, &open.display().to_string())))
}

/// Commands that save the content of a deleted device file.
#[must_use]
pub fn rescue(pool: &str, open: &str) -> String {
    format!(
        "While nothing writes to the pool: 'nacre pool sync {pool} && cp --sparse=always {open} NEWFILE',\nthen 'nacre pool export -f {pool} && nacre pool import -d NEWFILE {pool}'"
    )
}

/// Checks that the pool may be changed.
fn writable(pool: &Imported, doing: &str) -> Result<(), Refusal> {
    if pool.read_only {
        return Err(Refusal::new(Kind::Permission, format!("{doing}: pool is read only"))
            .next("export it and import it without '-o readonly=on'"));
    }
    Ok(())
}

/// Exports or destroys the pool. If that fails, its file systems are mounted again.
fn leave(pool: &Imported, mounts: &dyn Mounts, force: bool, doing: &str) -> Result<PoolAnswer, Refusal> {
    let name = pool.name();
    if doing == "destroy" {
        writable(pool, &format!("cannot destroy '{name}'"))?;
    }
    if let Some(why) = pool.suspended().filter(|_| !force) {
        let refusal =
            Refusal::new(Kind::Io, format!("cannot {doing} '{name}': pool I/O is currently suspended: {why}"));
        return Err(refusal.next("-f lets it go as it was at its last commit"));
    }
    if doing == "export" && !force {
        stays(pool)?;
    }
    let unmounted = fs::unmount_all(pool, mounts, force).and_then(|()| if force { Ok(()) } else { whole(pool, doing) });
    if let Err(refusal) = unmounted {
        // The refusal is what counts; a mount that fails here did not exist before.
        if let Err(again) = fs::mount_all(pool, mounts, &mut crate::Silent) {
            tracing::warn!(error = %again, "file systems were not mounted again");
        }
        return Err(refusal);
    }
    let left = if doing == "destroy" { pool.destroy() } else { pool.export() };
    match left {
        Ok(()) => Ok(PoolAnswer::Done),
        // Nothing can be saved any more but what is durable already: the last root, and the log.
        Err(error) if force && pool.suspended().is_some() => {
            tracing::error!(%error, "a suspended pool is let go");
            Ok(if doing == "destroy" { PoolAnswer::NotDestroyed } else { PoolAnswer::Done })
        }
        Err(error) => Err(Refusal::pool(format!("cannot {doing} '{name}'"), &error)),
    }
}

/// Checks that no written data would be lost when the pool is released.
fn whole(pool: &Imported, doing: &str) -> Result<(), Refusal> {
    let what = || format!("cannot {doing} '{}'", pool.name());
    if doing == "destroy" || pool.read_only {
        return Ok(());
    }
    pool.pool.commit().map_err(|error| Refusal::pool(what(), &error))?;
    let Some((files, error)) = pool.pool.unstored() else { return Ok(()) };
    let files = if files == 1 { "a file".to_owned() } else { format!("{files} files") };
    let refusal = Refusal::new(Kind::Io, format!("{}: what was written to {files} cannot be stored: {error}", what()));
    Err(refusal.next("-f leaves it, and that is lost"))
}

fn status(pool: &Imported, mounts: &dyn Mounts, names: bool) -> Result<Status, Refusal> {
    let figures = Figures::of(pool)?;
    let names = names && !figures.waits;
    if names {
        damaged::seek(pool);
    }
    let found = pool.watch.damage();
    let names = if names { damaged::names(pool, mounts, &found) } else { Vec::new() };
    Ok(Status {
        figures,
        scrub: pool.scrub.report(),
        resilver: pool.resilver.report(),
        reshape: pool.reshape.report(),
        damaged: found.count(),
        names,
    })
}

fn expand(pool: &Imported, paths: &[PathBuf]) -> Result<(), Refusal> {
    let doing = format!("cannot expand '{}'", pool.name());
    writable(pool, &doing)?;
    let known: Vec<PathBuf> = pool.devices.read().iter().map(|device| PathBuf::from(device.name())).collect();
    if let Some(other) = paths.iter().find(|path| !known.contains(path)) {
        let refusal = Refusal::new(Kind::NotFound, format!("{doing}: no such device in pool: {}", other.display()));
        return Err(refusal.next(format!("nacre pool status {} lists them", pool.name())));
    }
    // All that have grown: in a pool without redundancy, no device is to stay smaller than the others.
    pool.expand().map(drop).map_err(|error| Refusal::pool(doing, &error))
}

fn history(pool: &Imported) -> Result<Vec<Line>, Refusal> {
    let rows = pool.pool.history()?;
    let line = |HistoryRow { at, txg, uid, internal, host, text }| Line { at, txg: txg.0, uid, internal, host, text };
    Ok(rows.into_iter().map(line).collect())
}

/// Sends each event as a note of JSON, until the caller disconnects.
fn follow(pool: &Imported, progress: &mut dyn Progress) -> Result<(), Refusal> {
    let mut last = 0;
    loop {
        let events = pool.watch.wait(last, LOOK_UP);
        if events.is_empty() && !progress.note("") {
            return Ok(());
        }
        for event in events {
            last = event.number;
            let line = serde_json::to_string(&event)
                .map_err(|error| Refusal::new(Kind::Io, format!("cannot write down an event: {error}")))?;
            if !progress.note(&line) {
                return Ok(());
            }
        }
    }
}

/// Adds a line to the history; a pool that cannot take it any more has reported this elsewhere.
pub fn remember(pool: &Imported, uid: u32, text: &str) {
    if pool.read_only || text.is_empty() {
        return;
    }
    // A row has no room for more.
    let fits: String = text.chars().take(HISTORY_LINE_MOST / 4).collect();
    let line = HistoryRow {
        at: i64::try_from(crate::clock::now()).unwrap_or(i64::MAX),
        txg: pool.store.durable(),
        uid,
        internal: false,
        host: pool.opening.host.1.clone(),
        text: fits,
    };
    if let Err(error) = pool.pool.remember(&line) {
        tracing::warn!(%error, "the history was not written");
    }
}
