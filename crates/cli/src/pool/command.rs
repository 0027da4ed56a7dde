//! The command line of `nacre pool`, as part of the table in [`crate::commands`]. The letters are
//! ZFS'. Pure; the matched arguments are parsed by [`super::verb`].

use super::{changing, unserved::UNSERVED};
use crate::clap_args::{self, flag, json};
use clap::{Arg, ArgAction, Command, value_parser};
use std::ffi::OsString;

/// The command line of `nacre pool`.
pub fn command() -> Command {
    let verbs = [
        create(),
        destroy(),
        list(),
        status(),
        add(),
        import(),
        export(),
        get(),
        set(),
        history(),
        events(),
        iostat(),
        scrub(),
        trim(),
        wait(),
        sync(),
        clear(),
        online(),
        offline(),
        replace(),
        attach(),
        detach(),
        labelclear(),
        probe(),
        inspect(),
        check(),
        upgrade(),
        Command::new("version").about("Show the version of the program").arg(json()),
    ];
    let unserved = UNSERVED.iter().map(|unserved| {
        let rest = Arg::new("REST")
            .num_args(0..)
            .allow_hyphen_values(true)
            .trailing_var_arg(true)
            .value_parser(value_parser!(OsString));
        Command::new(unserved.verb).hide(true).disable_help_flag(true).arg(rest)
    });
    Command::new("pool")
        .about("Pools of devices or files that hold file systems, snapshots and clones")
        .after_help(
            "Examples:\n  nacre pool create --size 10G tank ~/tank.pool\n  nacre pool status\n  nacre pool scrub -w tank\n  nacre pool export tank\n  nacre pool import -d ~/tank.pool tank\n\nThe letters of options are those of `zpool`; called by that name, the program takes its command lines. `nacre fs` is for what is in pools.",
        )
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(verbs)
        .subcommands(changing::commands())
        .subcommands(unserved)
}

/// Returns options of `zpool` that have no effect here.
fn without_effect(letters: &'static str) -> impl Iterator<Item = Arg> {
    const NAMES: [(&str, char); 7] =
        [("-l", 'l'), ("-y", 'y'), ("-i", 'i'), ("-s", 's'), ("-t", 't'), ("-D", 'D'), ("-d", 'd')];
    NAMES
        .iter()
        .filter(move |(_, letter)| letters.contains(*letter))
        .map(|(name, letter)| flag(*letter, name, "").hide(true))
}

/// Returns the options for the names of devices in a table.
fn called() -> [Arg; 3] {
    [
        flag('g', "called-guid", "Devices by their numbers"),
        flag('L', "called-real", "Devices by where symbolic links end"),
        flag('P', "called-path", "Disks by their whole paths"),
    ]
}

fn option(letter: char, name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).short(letter).value_name(value).help(help)
}

fn several(letter: char, name: &'static str, value: &'static str, help: &'static str) -> Arg {
    option(letter, name, value, help).action(ArgAction::Append)
}

fn pools(help: &'static str) -> Arg {
    Arg::new("POOL").num_args(0..).action(ArgAction::Append).help(help)
}

fn one_pool() -> Arg {
    Arg::new("POOL").required(true).help("Which pool")
}

fn devices() -> Arg {
    clap_args::path("DEVICE", "Files or block devices").num_args(1..).action(ArgAction::Append)
}

fn size() -> Arg {
    Arg::new("size").long("size").value_name("SIZE").help("Make the files, each with this length")
}

fn cache() -> Arg {
    Arg::new("cache")
        .long("cache")
        .value_name("SIZE")
        .help("The limit of the cache in memory [default: 256M, or an eighth of the memory there is]")
}

fn foreground() -> Arg {
    Arg::new("foreground")
        .long("foreground")
        .action(ArgAction::SetTrue)
        .help("Own the pool in this very process until it is exported, for a service (Type=notify)")
}

fn survive() -> Arg {
    Arg::new("survive").long("survive").action(ArgAction::SetTrue).help(
        "Go on when the process that owns the pool is killed or crashes: mounts, open files and what was acknowledged as well",
    )
}

fn altroot() -> Arg {
    option('R', "altroot", "DIR", "All mount points lie below it").value_parser(value_parser!(OsString))
}

fn form(command: Command) -> Command {
    command
        .arg(flag('H', "scripted", "No headings, one tab between columns"))
        .arg(flag('p', "exact", "Exact numbers"))
        .arg(json())
}

fn of_json(name: &'static str, long: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(long).action(ArgAction::SetTrue).requires("json").help(help)
}

/// Returns the options for the form of JSON.
fn json_form() -> [Arg; 2] {
    [
        of_json("integers", "json-int", "As JSON, with numbers as exact numbers instead of text"),
        of_json("by-guid", "json-pool-key-guid", "As JSON, with pools by their numbers instead of names"),
    ]
}

fn time() -> Arg {
    option('T', "time", "u|d", "The time before each table, in seconds or as a date").value_parser(["u", "d"])
}

fn create() -> Command {
    Command::new("create")
        .about("Make a pool of files or block devices")
        .after_help("Examples:\n  nacre pool create --size 10G tank ~/tank.pool\n  nacre pool create -o autotrim=on -O compression=zstd -O atime=off -m /srv/data data /dev/sdb /dev/sdc\n  nacre pool create safe mirror /dev/sdb /dev/sdc\n  nacre pool create large raidz2 /dev/sdb /dev/sdc /dev/sdd /dev/sde /dev/sdf /dev/sdg\n  nacre pool create fast mirror /dev/sdb /dev/sdc special mirror /dev/nvme0n1 /dev/nvme1n1 log /dev/nvme2n1 spare /dev/sdd\n  nacre pool create --survive -m /home homes /dev/sdb\n  nacre pool create -n tank /dev/sdb\n\n`mirror`, `raidz1`, `raidz2` or `raidz3` before devices makes a group of them that can do without some. Behind `special` stand devices for metadata, behind `log` those for what is synced, behind `spare` those that stand in for others. What is on the devices is lost. One that holds a file system or another pool is refused; -f takes it all the same.")
        .arg(flag('f', "force", "Also on devices that hold something else, and of groups that do not go together"))
        .arg(flag('n', "only-say", "Only say what would be done"))
        .arg(flag('d', "-d", "").hide(true))
        .arg(several('o', "properties", "PROPERTY=VALUE", "A property of the pool"))
        .arg(several('O', "root-properties", "PROPERTY=VALUE", "A property of its own file system"))
        .arg(option('m', "mountpoint", "PATH", "Where its own file system is mounted [default: /POOL, for ordinary users ~/POOL]"))
        .arg(altroot())
        .arg(size())
        .arg(cache())
        .arg(survive())
        .args(way())
        .arg(Arg::new("POOL").required(true).help("Its name"))
        .arg(devices())
}

/// Returns the options for the access to an object store.
fn way() -> [Arg; 8] {
    let way = |name, value, help| Arg::new(name).long(name).value_name(value).help(help);
    [
        way("endpoint", "URL", "The server of the store [default: AWS_ENDPOINT_URL, or Amazon's, Azure's or Google's]"),
        way("account", "NAME", "The account of az:// [default: AZURE_STORAGE_ACCOUNT]"),
        way("region", "REGION", "The region of s3:// [default: AWS_REGION, or us-east-1]"),
        way("profile", "NAME", "The profile with its credentials [default: AWS_PROFILE, or the environment's]"),
        way("credentials-file", "FILE", "The file that credentials are in [default: ~/.aws/credentials]")
            .value_parser(value_parser!(OsString)),
        way(
            "cache-dir",
            "DIR",
            "Where parts of it are kept on this machine [default: /var/cache/nacre, or ~/.cache/nacre]",
        )
        .value_parser(value_parser!(OsString)),
        way(
            "cache-size",
            "SIZE",
            "How much of it is kept at most, 0 for nothing [default: 4G, or a quarter of what is free there]",
        ),
        way(
            "log-dir",
            "DIR",
            "Where what is synced lies on this machine with log=local [default: /var/lib/nacre/log, or ~/.local/state/nacre/log]",
        )
        .value_parser(value_parser!(OsString)),
    ]
}

fn destroy() -> Command {
    Command::new("destroy")
        .about("Destroy a pool with everything in it")
        .after_help("Examples:\n  nacre pool destroy tank\n  nacre pool destroy s3://my-bucket/tank\n\nAs long as nothing else is written to its devices, `nacre pool import -D` brings it back. With the address of a bucket, objects are removed that an earlier destroy has left.")
        .arg(flag('f', "force", "Even while its file systems are used"))
        .arg(one_pool())
}

fn list() -> Command {
    form(Command::new("list"))
        .about("Show the pools that are imported")
        .after_help(
            "Examples:\n  nacre pool list\n  nacre pool list -v tank\n  nacre pool list -H -p -o name,size,free\n  nacre pool list --json",
        )
        .arg(option('o', "columns", "PROPERTY,...", "Which columns"))
        .arg(flag('v', "verbose", "Also each device"))
        .args(json_form())
        .arg(clap_args::all_users())
        .arg(time())
        .args(called())
        .arg(pools("Which [default: all]; and [INTERVAL [COUNT]]: again after so many seconds"))
}

fn status() -> Command {
    Command::new("status")
        .about("Show the health of pools: devices, errors, verification, damaged files")
        .after_help("Examples:\n  nacre pool status\n  nacre pool status -x\n  nacre pool status -v tank\n  nacre pool status --json tank")
        .arg(flag('v', "verbose", "Damaged files by name"))
        .arg(flag('x', "ill", "Only pools with something wrong"))
        .arg(flag('t', "trim", "Also what devices were told of free room"))
        .arg(flag('e', "ill-devices", "Only devices with something wrong"))
        .arg(option('c', "scripts", "SCRIPT,...", "Also what these programs in ~/.zpool.d or /etc/zfs/zpool.d tell of each device"))
        .arg(flag('p', "exact", "Exact numbers"))
        .arg(json())
        .args(json_form())
        .arg(of_json("flat", "json-flat-vdevs", "As JSON, with devices beside each other"))
        .arg(clap_args::all_users())
        .arg(time())
        .args(called())
        .args(without_effect("Disd"))
        .arg(Arg::new("power").long("power").action(ArgAction::SetTrue).hide(true))
        .arg(pools("Which [default: all]; and [INTERVAL [COUNT]]: again after so many seconds"))
}

fn add() -> Command {
    Command::new("add")
        .about("Add devices, groups of devices, devices for metadata or the log, or spares to a pool")
        .after_help("Examples:\n  nacre pool add tank /dev/sdc\n  nacre pool add --size 10G tank ~/more.pool\n  nacre pool add safe mirror /dev/sdd /dev/sde\n  nacre pool add safe log mirror /dev/nvme0n1 /dev/nvme1n1\n  nacre pool add safe special mirror /dev/nvme2n1 /dev/nvme3n1\n  nacre pool add safe spare /dev/sdf\n\nThe pool gets larger. `special` is for metadata, `log` for what is synced; a spare takes the place of a device that fails, by itself. Only devices for the log and spares can be taken out again.")
        .arg(flag('f', "force", "Also devices that hold something else, and groups of other redundancy"))
        .arg(flag('n', "only-say", "Only say what would be done"))
        .args(called())
        .arg(several('o', "properties", "ashift=NUMBER", "Taken for ZFS' sake: the size of sectors is the device's affair"))
        .arg(size())
        .arg(one_pool())
        .arg(devices())
}

fn import() -> Command {
    Command::new("import")
        .about("Import a pool, or show which could be")
        .after_help("Examples:\n  nacre pool import\n  nacre pool import tank\n  nacre pool import -d ~/tank.pool tank\n  nacre pool import -d /srv/pools -o readonly=on tank\n  nacre pool import -d /srv/pools 8421337046921 other\n  nacre pool import --survive tank\n  nacre pool import --foreground tank\n  nacre pool import -F tank\n  nacre pool import -m tank\n\nWithout -d, block devices are looked at, and what was imported before.")
        .arg(flag('a', "all", "All that are found"))
        .arg(flag('D', "destroyed", "Pools that were destroyed (with -f or by name: bring back)"))
        .arg(several('d', "places", "DIR|DEVICE", "Where to look, and nowhere else").value_parser(value_parser!(OsString)))
        .arg(
            option('c', "cachefile", "FILE", "What this file says was imported with -o cachefile=FILE")
                .value_parser(value_parser!(OsString))
                .conflicts_with("places"),
        )
        .arg(flag('f', "force", "Also when another machine had it last, and as its properties say where others than root can write its devices"))
        .arg(Arg::new("trust").long("trust").action(ArgAction::SetTrue).help("As its properties say, although others can write its devices or its bucket; of a bucket, also at later imports here"))
        .arg(flag('F', "rewind", "If its last state cannot be read, go back to the newest one that can"))
        .arg(option('T', "txg", "TXG", "Go back to the state after this transaction group").value_parser(value_parser!(u64)))
        .arg(flag('n', "only-say", "With -F: only say what would be done"))
        .arg(flag('N', "no-mounts", "Mount nothing"))
        .arg(flag('t', "temporary", "The new name is for this import alone: the pool keeps its own"))
        .arg(several('o', "properties", "PROPERTY=VALUE", "readonly=on, or a property of the pool"))
        .arg(altroot())
        .arg(cache())
        .arg(survive())
        .arg(foreground())
        .args(way())
        .arg(flag('m', "without-log", "Also where devices for the log are missing: what was synced last, and they alone had, is given up"))
        .args(without_effect("sl"))
        .arg(Arg::new("POOL").help("Its name or number, or s3://BUCKET/PREFIX"))
        .arg(Arg::new("NEW").help("A new name for it"))
}

fn export() -> Command {
    Command::new("export")
        .about("Unmount a pool's file systems and let it go, so that it can be imported elsewhere")
        .after_help("Examples:\n  nacre pool export tank\n  nacre pool export -a")
        .arg(flag('a', "all", "All pools"))
        .arg(flag('f', "force", "Even while its file systems are used"))
        .arg(pools("Which").required_unless_present("all"))
}

fn get() -> Command {
    form(Command::new("get"))
        .about("Show properties of pools")
        .after_help(
            "Examples:\n  nacre pool get all tank\n  nacre pool get -H -o value health tank\n  nacre pool get capacity,fragmentation",
        )
        .arg(option('o', "fields", "name,property,value,source", "Which columns"))
        .args(json_form())
        .arg(Arg::new("PROPERTIES").required(true).value_name("all|PROPERTY,...").help("Which properties"))
        .arg(pools("Of which pools [default: all]; or of a pool, and behind it all-vdevs or devices of it"))
}

fn set() -> Command {
    Command::new("set")
        .about("Set a property of a pool")
        .after_help("Examples:\n  nacre pool set autotrim=on tank\n  nacre pool set comment='photos and films' tank\n  nacre pool set backup:last=2026-11-20 tank")
        .arg(Arg::new("PROPERTY").required(true).value_name("PROPERTY=VALUE").help("Which, and its value"))
        .arg(one_pool())
        // Refused with a reason.
        .arg(Arg::new("DEVICE").hide(true))
}

fn history() -> Command {
    Command::new("history")
        .about("Show which commands have changed a pool")
        .after_help("Examples:\n  nacre pool history tank\n  nacre pool history -l")
        .arg(flag('i', "internal", "Also what the pool did by itself"))
        .arg(flag('l', "long", "Also who and where"))
        .arg(pools("Which [default: all]"))
}

fn events() -> Command {
    Command::new("events")
        .about("Show what has happened to pools since their import")
        .after_help("Examples:\n  nacre pool events\n  nacre pool events -f tank\n  nacre pool events -v tank")
        .arg(flag('v', "verbose", "Everything about each"))
        .arg(flag('H', "scripted", "No headings, one tab between columns"))
        .arg(flag('f', "follow", "Go on until interrupted (of one pool)"))
        .arg(flag('c', "clear", "Forget them"))
        .arg(Arg::new("POOL").help("Which [default: all]"))
}

fn iostat() -> Command {
    form(Command::new("iostat"))
        .about("Show what pools and devices read and write")
        .after_help("Examples:\n  nacre pool iostat\n  nacre pool iostat -v tank 5\n  nacre pool iostat -l tank 1 10\n  nacre pool iostat -w tank\n\nThe first table is the average since the import (-y leaves it out), each further one that of the interval.")
        .arg(flag('v', "verbose", "Also each device"))
        .arg(flag('l', "latency", "Also how long requests take"))
        .arg(flag('q', "queue", "Also how many requests are under way"))
        .arg(flag('w', "times", "How many requests took how long, by powers of two").conflicts_with_all(["latency", "queue"]))
        .arg(flag('r', "sizes", "How many requests had which size, by powers of two").conflicts_with_all(["latency", "queue", "times"]))
        .arg(time())
        .args(called())
        .arg(flag('n', "headings-once", "Headings over the first table alone"))
        .args(without_effect("y"))
        .arg(pools("Which [default: all]; and [INTERVAL [COUNT]]: again after so many seconds"))
}

fn scrub() -> Command {
    Command::new("scrub")
        .about("Verify everything that is stored, in the background; `status` shows how far it is")
        .after_help(
            "Examples:\n  nacre pool scrub tank\n  nacre pool scrub -w tank\n  nacre pool scrub -p tank\n  nacre pool scrub -s tank\n  nacre pool scrub -e tank\n  nacre pool scrub --rate 50M tank",
        )
        .arg(flag('s', "stop", "End it").conflicts_with("pause"))
        .arg(flag('p', "pause", "Pause it; without a letter it goes on"))
        .arg(flag('e', "errors", "Only what is known to be damaged").conflicts_with_all(["stop", "pause"]))
        .arg(flag('C', "continue", "Only what was written since the last one that came to its end").conflicts_with_all(["stop", "pause", "errors"]))
        .arg(Arg::new("rate").long("rate").value_name("SIZE").help("At most so many bytes a second, from now on; 0: as fast as it can").conflicts_with_all(["stop", "pause"]))
        .arg(flag('w', "wait", "Wait for its end").conflicts_with_all(["stop", "pause"]))
        .arg(flag('a', "all", "All pools").conflicts_with("POOL"))
        .arg(pools("Which").required_unless_present("all"))
}

fn trim() -> Command {
    Command::new("trim")
        .about("Tell block devices which sectors hold nothing, and make holes in files there; in the background")
        .after_help("Examples:\n  nacre pool trim tank\n  nacre pool trim -w -r 200M tank /dev/sdc\n  nacre pool trim -s tank\n  nacre pool trim -c tank\n\n`nacre pool status -t` shows how far it is. `nacre pool set autotrim=on POOL` does it by itself with what becomes free.")
        .arg(flag('c', "cancel", "End it").conflicts_with_all(["suspend", "wait", "rate"]))
        .arg(flag('s', "suspend", "Suspend it; without a letter it goes on").conflicts_with_all(["wait", "rate"]))
        .arg(flag('w', "wait", "Wait for its end"))
        .arg(flag('d', "secure", "").hide(true))
        .arg(option('r', "rate", "SIZE", "At most so many bytes a second"))
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "Which [default: all]").required(false).num_args(0..))
}

fn wait() -> Command {
    Command::new("wait")
        .about("Wait for the end of what a pool does by itself")
        .after_help("Examples:\n  nacre pool wait tank\n  nacre pool wait -t scrub,trim tank")
        .arg(
            option(
                't',
                "activity",
                "ACTIVITY,...",
                "For what: scrub, resilver, remove, raidz_expand, convert, rebalance, trim, free [default: all]",
            )
            .value_delimiter(',')
            .action(ArgAction::Append),
        )
        .arg(one_pool())
}

fn sync() -> Command {
    Command::new("sync")
        .about("Make everything durable that was written to pools")
        .after_help("Examples:\n  nacre pool sync\n  nacre pool sync tank")
        .arg(pools("Which [default: all]"))
}

fn upgrade() -> Command {
    Command::new("upgrade")
        .about("Enable what this program knows and pools do not have yet, or show which that are")
        .after_help("Examples:\n  nacre pool upgrade\n  nacre pool upgrade -v\n  nacre pool upgrade tank\n  nacre pool upgrade -a")
        .arg(flag('v', "list", "Show all versions and features that this program knows"))
        .arg(flag('a', "all", "All pools").conflicts_with("POOL"))
        .arg(pools("Which [default: show those that lack something]"))
}

fn clear() -> Command {
    Command::new("clear")
        .about("Forget the errors that were counted and the damage that was found; open again the devices that failed or were missing")
        .after_help("Examples:\n  nacre pool clear tank\n  nacre pool clear tank /dev/sdc")
        .arg(flag('F', "rewind", "").hide(true))
        .arg(flag('n', "-n", "").hide(true))
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "Only what was counted of this one").required(false))
}

fn online() -> Command {
    Command::new("online")
        .about("Bring devices back, or use all of those that have become longer")
        .after_help("Examples:\n  nacre pool online tank /dev/sdc\n  truncate -s 20G ~/tank.pool && nacre pool online -e tank\n\nA device that was taken offline, or has failed, gets what it has missed, in the background. With `nacre pool set autoexpand=on POOL`, each\nimport does so by itself.")
        .arg(flag('e', "expand", "Use all of them"))
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "Which [default: all]").required(false).num_args(0..))
}

fn offline() -> Command {
    Command::new("offline")
        .about("Take devices offline without which nothing is lost")
        .after_help("Examples:\n  nacre pool offline tank /dev/sdc\n\nIt stays offline over imports, until `nacre pool online`.")
        .args(without_effect("t"))
        .arg(flag('f', "force", "").hide(true))
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "Which").num_args(1..))
}

fn replace() -> Command {
    Command::new("replace")
        .about("Put another device in the place of one")
        .after_help("Examples:\n  nacre pool replace tank /dev/sdc /dev/sdf\n  nacre pool replace -w tank /dev/sdc\n\nThe new one gets everything that the other held, in the background, computed from the others. One name alone: what is at the same path now.")
        .arg(flag('f', "force", "Also one that holds something else"))
        .arg(flag('w', "wait", "Wait until it has everything"))
        .args(without_effect("s"))
        .arg(size())
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "The one, and the other").num_args(1..=2))
}

fn attach() -> Command {
    Command::new("attach")
        .about("Make a device one more copy of a mirror, a mirror of one that is for itself, or a RAID-Z group wider")
        .after_help("Examples:\n  nacre pool attach tank /dev/sdb /dev/sdc\n  nacre pool attach -w tank /dev/sdb /dev/sdd\n  nacre pool attach tank raidz1-0 /dev/sde\n\nIt gets everything, or its part, in the background; `status` shows how far it is.")
        .arg(flag('f', "force", "Also one that holds something else"))
        .arg(flag('w', "wait", "Wait until it has everything"))
        .arg(flag('n', "only-say", "Only say what a device more would give a group").conflicts_with("wait"))
        .args(without_effect("s"))
        .arg(several('o', "properties", "ashift=NUMBER", "").hide(true))
        .arg(size())
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "The one that is there, or the group, and the new one").num_args(2))
}

fn detach() -> Command {
    Command::new("detach")
        .about("Take a device out of a mirror, or give up a replacement")
        .after_help("Examples:\n  nacre pool detach tank /dev/sdc")
        .arg(one_pool())
        .arg(clap_args::path("DEVICE", "Which"))
}

fn labelclear() -> Command {
    Command::new("labelclear")
        .about("Remove the labels of a pool from a device that belongs to none any more")
        .after_help("Examples:\n  nacre pool labelclear /dev/sdc\n  nacre pool labelclear -f ~/old.pool")
        .arg(flag('f', "force", "Also of a pool that was exported, or not even that"))
        .arg(clap_args::path("DEVICE", "Which"))
}

fn target(command: Command) -> Command {
    command
        .arg(
            several('d', "places", "DIR|DEVICE", "Read it from its devices there: it must not be imported")
                .value_parser(value_parser!(OsString)),
        )
        .arg(Arg::new("POOL").required_unless_present("places").help("Which: one that is imported, or is found by -d"))
}

fn probe() -> Command {
    Command::new("probe")
        .about("Print which pool a device belongs to, as lines of KEY=value for udev")
        .after_help("Examples:\n  nacre pool probe /dev/sdc\n\nudev calls it by the rule 61-nacre.rules: then `lsblk -f` and installers show the device as a part of a pool. It reads the labels alone, also while the pool is imported.")
        .arg(clap_args::path("DEVICE", "Which"))
}

fn inspect() -> Command {
    target(Command::new("inspect"))
        .about("Show what is on the devices of a pool: labels, root records, segments, frames, rows")
        .after_help("Examples:\n  nacre pool inspect tank\n  nacre pool inspect --segments tank\n  nacre pool inspect --frames 12 tank\n  nacre pool inspect --rows tank/home@monday tank\n  nacre pool inspect -d ~/tank.pool\n\ndocs/pool-format.md tells what it means.")
        .arg(Arg::new("segments").long("segments").action(ArgAction::SetTrue).help("All segments"))
        .arg(Arg::new("frames").long("frames").value_name("SEGMENT").value_parser(value_parser!(u32)).help("The frames of a segment"))
        .arg(Arg::new("rows").long("rows").value_name("DATASET").help("The rows of a file system or snapshot"))
}

fn check() -> Command {
    target(Command::new("check"))
        .about("Check a pool: every tree against what is stored, every name against its file, every checksum")
        .after_help("Examples:\n  nacre pool check tank\n  nacre pool check -d ~/tank.pool\n\nIt changes nothing. Of a pool that is imported, writers wait meanwhile; `scrub` verifies without that.")
}
