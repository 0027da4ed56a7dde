//! `nacre pool remove`, `convert`, `rebalance`, `reshape`, `plan`: topology changes of pools.
//! Command lines, requests, and the lines of `status` about a change. Pure; carried out by
//! [`super::shapes`].

use super::args;
use crate::clap_args::{self, flag};
use clap::{Arg, ArgMatches, Command, value_parser};
use nacre_admin::pool::{DeviceFigures, Phase, ReshapeOrder, ReshapeReport, Reshaping, figures::percent};
use nacre_daemon::{failure::Failure, pool::dates};
use nacre_pool::properties::size::human_bytes;
use std::{ffi::OsString, path::PathBuf};

/// A verb on the topology of a pool.
#[derive(Debug, PartialEq, Eq)]
pub enum Changing {
    /// Remove devices or groups, or (`only_say`) report the effect.
    Remove { name: String, devices: Vec<PathBuf>, force: bool, only_say: bool, exact: bool, wait: bool },
    /// Convert a group to another kind.
    Convert {
        name: String,
        group: PathBuf,
        to: String,
        devices: Vec<PathBuf>,
        size: Option<u64>,
        force: bool,
        only_say: bool,
        wait: bool,
    },
    /// Even out the use of devices.
    Rebalance { name: String, rate: Option<u64>, only_say: bool, wait: bool },
    /// Resume, limit, pause or stop the running change.
    Reshape { name: String, order: ReshapeOrder, wait: bool },
    /// Report the effect of a change.
    Plan { name: String, verb: String, words: Vec<PathBuf>, exact: bool },
}

fn words(about: &'static str) -> Arg {
    clap_args::path("DEVICE", about).num_args(1..)
}

fn one_pool() -> Arg {
    Arg::new("POOL").required(true).help("Which")
}

fn exact() -> Arg {
    flag('p', "exact", "Say sizes in bytes")
}

fn size() -> Arg {
    Arg::new("size").long("size").value_name("SIZE").help("Make files with this length, such as 10G")
}

fn rate() -> Arg {
    Arg::new("rate").long("rate").value_name("SIZE").help("Move at most so many bytes a second; 0: as many as it can")
}

/// Returns the command lines of topology changes.
pub fn commands() -> [Command; 5] {
    [
        Command::new("remove")
            .about("Take devices or groups out of a pool, in use")
            .after_help("Examples:\n  nacre pool remove -n tank mirror-1\n  nacre pool remove -w tank mirror-1\n  nacre pool remove tank /dev/sdf\n  nacre pool remove -s tank\n\nWhat they hold is moved to the others in the background; `status` shows how far it is. Then they are free. A RAID-Z group becomes narrower by the devices that are removed from it. Spares and devices for the log leave at once.")
            .arg(flag('f', "force", "Also where fewer devices may fail then"))
            .arg(flag('n', "only-say", "Only say what that would give"))
            .arg(flag('s', "stop", "Stop it: nothing is removed").conflicts_with_all(["only-say", "wait", "force"]))
            .arg(flag('w', "wait", "Wait for its end").conflicts_with("only-say"))
            .arg(exact())
            .arg(one_pool())
            .arg(words("Which devices, or groups such as mirror-1").required(false).required_unless_present("stop")),
        Command::new("convert")
            .about("Make a group of devices one of another kind, in use")
            .after_help("Examples:\n  nacre pool convert tank mirror-0 raidz1 /dev/sdc\n  nacre pool convert -n tank raidz1-0 raidz2 /dev/sdf\n  nacre pool convert -w tank raidz2-0 raidz1\n\nWhat is written lies in the new shape at once, what there is is moved in the background; `status` shows how far it is.")
            .arg(flag('f', "force", "Also where fewer devices may fail, and with devices that hold something else"))
            .arg(flag('n', "only-say", "Only say what that would give"))
            .arg(flag('w', "wait", "Wait for its end").conflicts_with("only-say"))
            .arg(size())
            .arg(one_pool())
            .arg(Arg::new("GROUP").required(true).value_parser(value_parser!(OsString)).help("Which group, such as mirror-0"))
            .arg(Arg::new("KIND").required(true).help("mirror, raidz1, raidz2 or raidz3"))
            .arg(clap_args::path("DEVICE", "Devices that come to it").required(false).num_args(0..)),
        Command::new("rebalance")
            .about("Move what there is from full devices to empty ones")
            .after_help("Examples:\n  nacre pool rebalance -w tank\n  nacre pool rebalance --rate 50M tank")
            .arg(rate())
            .arg(flag('n', "only-say", "Only say how much would be moved").conflicts_with("wait"))
            .arg(flag('w', "wait", "Wait for its end"))
            .arg(one_pool()),
        Command::new("reshape")
            .about("Pause, go on with or stop what changes the shape of a pool")
            .after_help("Examples:\n  nacre pool reshape -p tank\n  nacre pool reshape tank\n  nacre pool reshape --rate 20M tank\n  nacre pool reshape -s tank")
            .arg(flag('p', "pause", "Pause it; without a letter it goes on").conflicts_with("stop"))
            .arg(flag('s', "stop", "Stop it: what was moved stays where it is"))
            .arg(rate().conflicts_with_all(["pause", "stop"]))
            .arg(flag('w', "wait", "Wait for its end").conflicts_with_all(["pause", "stop"]))
            .arg(one_pool()),
        Command::new("plan")
            .about("Say what a change would give: room, failures survived, how much is moved, how long that takes")
            .after_help("Examples:\n  nacre pool plan tank remove mirror-1\n  nacre pool plan tank attach raidz1-0 /dev/sdf\n  nacre pool plan tank convert mirror-0 raidz1 /dev/sdc\n  nacre pool plan tank add mirror /dev/sdf /dev/sdg\n\nNothing is changed. A device that is not there yet counts as long as the shortest of the group.")
            .arg(exact())
            .arg(one_pool())
            .arg(Arg::new("VERB").required(true).value_parser(["remove", "attach", "convert", "rebalance", "add"]).help("Which change"))
            .arg(words("As with that verb").required(false).num_args(0..)),
    ]
}

/// Parses the matched arguments; `None` for other verbs.
///
/// # Errors
/// A value that does not fit.
pub fn parse(verb: &str, matches: &ArgMatches) -> Result<Option<Changing>, Failure> {
    let text = |name: &str| matches.get_one::<String>(name).cloned();
    let paths = |name: &str| -> Vec<PathBuf> {
        matches.get_many::<OsString>(name).into_iter().flatten().map(PathBuf::from).collect()
    };
    let bytes = |name: &str| -> Result<Option<u64>, Failure> {
        use nacre_pool::properties::size;
        let parse = |text: String| {
            size::parse(&text).map_err(|error| Failure::usage(format!("{name}: {error}")).next(size::FORM))
        };
        text(name).map(parse).transpose()
    };
    let (name, flag) = (text("POOL").unwrap_or_default(), |name| matches.get_flag(name));
    Ok(Some(match verb {
        "remove" if flag("stop") => Changing::Reshape { name, order: ReshapeOrder::Stop, wait: false },
        "remove" => Changing::Remove {
            name,
            devices: paths("DEVICE"),
            force: flag("force"),
            only_say: flag("only-say"),
            exact: flag("exact"),
            wait: flag("wait"),
        },
        "convert" => Changing::Convert {
            name,
            group: paths("GROUP").pop().unwrap_or_default(),
            to: text("KIND").unwrap_or_default(),
            devices: args::devices(paths("DEVICE"))?,
            size: bytes("size")?,
            force: flag("force"),
            only_say: flag("only-say"),
            wait: flag("wait"),
        },
        "rebalance" => {
            Changing::Rebalance { name, rate: bytes("rate")?, only_say: flag("only-say"), wait: flag("wait") }
        }
        "reshape" => {
            let order = match (flag("stop"), flag("pause"), bytes("rate")?) {
                (true, ..) => ReshapeOrder::Stop,
                (_, true, _) => ReshapeOrder::Pause,
                (.., Some(rate)) => ReshapeOrder::Rate(rate),
                _ => ReshapeOrder::Resume,
            };
            Changing::Reshape { name, order, wait: flag("wait") }
        }
        "plan" => {
            let (verb, words) = (text("VERB").unwrap_or_default(), paths("DEVICE"));
            if words.is_empty() != (verb == "rebalance") {
                let why = if words.is_empty() { "missing device or group" } else { "too many words" };
                return Err(Failure::usage(why).next("nacre help pool plan"));
            }
            Changing::Plan { name, verb, words, exact: flag("exact") }
        }
        _ => return Ok(None),
    }))
}

/// Returns the remark on a device that is being removed.
pub fn remark(device: &DeviceFigures) -> &'static str {
    if device.leaving { "  (removing)" } else { "" }
}

/// Describes a topology change: its heading in `status`, and the text.
pub fn status(report: &ReshapeReport, now: u64) -> Option<(&'static str, String)> {
    let heading = match report.kind {
        Reshaping::Removal => "remove",
        Reshaping::Expansion => "expand",
        Reshaping::Conversion => "convert",
        Reshaping::Rebalance => "rebalance",
    };
    let (what, moved) = (&report.what, human_bytes(report.moved));
    let doing = match report.kind {
        Reshaping::Removal => format!("Evacuation of {what}"),
        Reshaping::Expansion => format!("expansion of {what}"),
        Reshaping::Conversion => format!("conversion of {what}"),
        Reshaping::Rebalance => format!("rebalance of {what}"),
    };
    let words = match report.phase {
        Phase::Never => return None,
        Phase::Canceled if report.kind == Reshaping::Removal => {
            format!("Removal of {what} canceled on {}", dates::long(report.ended))
        }
        Phase::Canceled => format!("{doing} stopped on {}", dates::long(report.ended)),
        Phase::Finished => {
            let (length, ended) = (dates::length(report.elapsed / 1000), dates::long(report.ended));
            match report.kind {
                Reshaping::Removal => format!("Removal of {what} copied {moved} in {length}, completed on {ended}"),
                Reshaping::Expansion => format!("expanded {what} copied {moved} in {length}, on {ended}"),
                _ => format!("{doing} moved {moved} in {length}, completed on {ended}"),
            }
        }
        Phase::Running | Phase::Paused => {
            let total = report.moved + report.left;
            let done = percent(report.moved.saturating_mul(100), total).min(10_000);
            let speed = report.speed();
            let limited = |speed: u64| if report.rate == 0 { speed } else { speed.min(report.rate) };
            let limit =
                if report.rate == 0 { String::new() } else { format!(" (limit {}/s)", human_bytes(report.rate)) };
            let paused = report.phase == Phase::Paused;
            let to_go = match &report.held_up {
                Some(why) => format!("\n\theld up: {why}"),
                None if paused => format!(", paused since {}", dates::long(report.ended)),
                None if speed == 0 || now == report.started => ", no estimated completion time".to_owned(),
                None => format!(", {} to go", dates::length(report.left / limited(speed))),
            };
            format!(
                "{doing} in progress since {}\n\t{moved} copied out of {} at {}/s{limit}, {}.{:02}% done{to_go}",
                dates::long(report.started),
                human_bytes(total),
                human_bytes(speed),
                done / 100,
                done % 100
            )
        }
    };
    Some((heading, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_told() {
        let mut report = ReshapeReport {
            phase: Phase::Running,
            what: "mirror-1".to_owned(),
            started: 1_700_000_000,
            elapsed: 2000,
            moved: 10 << 20,
            left: 30 << 20,
            ..ReshapeReport::default()
        };
        let (heading, words) = status(&report, 1_700_000_002).unwrap();
        assert_eq!(heading, "remove");
        assert!(words.starts_with("Evacuation of mirror-1 in progress since "), "{words}");
        assert!(words.ends_with("10M copied out of 40M at 5M/s, 25.00% done, 00:00:06 to go"), "{words}");
        report.rate = 3 << 20;
        let words = status(&report, 1_700_000_002).unwrap().1;
        assert!(words.ends_with("at 5M/s (limit 3M/s), 25.00% done, 00:00:10 to go"), "{words}");
        report.held_up = Some("no room".to_owned());
        assert!(status(&report, 1_700_000_002).unwrap().1.ends_with("25.00% done\n\theld up: no room"));
        report.phase = Phase::Finished;
        assert!(status(&report, 0).unwrap().1.starts_with("Removal of mirror-1 copied 10M in "));
        assert_eq!(status(&ReshapeReport::default(), 0), None);
    }
}
