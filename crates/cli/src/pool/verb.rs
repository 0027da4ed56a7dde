//! The requests of `nacre pool`'s command lines, as plain data. Pure: arguments in, verbs out.

use super::{
    args, called::Called, changing, form::PoolForm, histograms::Of, iostat::IostatColumns, status,
    unserved::UnservedCall,
};
use crate::clap_args::texts;
use clap::ArgMatches;
use nacre_admin::pool::{Extent, ScrubOrder, TrimOrder, inspect::Wanted, properties};
use nacre_daemon::failure::Failure;
use std::{ffi::OsString, path::PathBuf};

/// A verb on pools.
#[derive(Debug, PartialEq, Eq)]
pub enum PoolVerb {
    /// Create a pool.
    Create(ToCreate),
    /// Destroy a pool.
    Destroy { name: String, force: bool },
    /// Show a table of pools.
    List {
        form: PoolForm,
        columns: Option<Vec<String>>,
        verbose: bool,
        names: Vec<String>,
        everybody: bool,
        again: Again,
    },
    /// Show the health of pools.
    Status { shown: status::StatusView, names: Vec<String>, everybody: bool, again: Again },
    /// Add devices.
    Add {
        name: String,
        devices: Vec<PathBuf>,
        groups: args::Groups,
        size: Option<u64>,
        force: bool,
        only_say: bool,
        called: Called,
    },
    /// Import pools, or show the importable ones.
    Import(ToImport),
    /// Export pools.
    Export { names: Vec<String>, all: bool, force: bool },
    /// Show properties.
    Get { form: PoolForm, fields: Option<Vec<String>>, properties: Vec<String>, names: Vec<String> },
    /// Use the full size of devices that have grown.
    Expand { name: String, devices: Vec<PathBuf> },
    /// Bring devices online that were taken offline or have failed.
    Online { name: String, devices: Vec<PathBuf> },
    /// Take devices offline.
    Offline { name: String, devices: Vec<PathBuf> },
    /// Replace a device.
    Replace { name: String, old: PathBuf, new: PathBuf, size: Option<u64>, force: bool, wait: bool },
    /// Add a mirror device next to an existing one, or a device to a group.
    Attach { name: String, beside: PathBuf, new: PathBuf, size: Option<u64>, force: bool, only_say: bool, wait: bool },
    /// Take a device out of its mirror.
    Detach { name: String, device: PathBuf },
    /// Change the topology of a pool.
    Changing(changing::Changing),
    /// Set a property.
    Set { name: String, value: String, pool: String },
    /// Show the command history.
    History { names: Vec<String>, internal: bool, long: bool },
    /// Show events.
    Events { name: Option<String>, follow: bool, verbose: bool, scripted: bool, clear: bool },
    /// Show I/O statistics.
    Iostat { form: PoolForm, verbose: bool, shown: IostatColumns, names: Vec<String>, again: Again },
    /// Start, pause or stop a scrub.
    Scrub { names: Vec<String>, all: bool, order: ScrubOrder, rate: Option<u64>, wait: bool },
    /// Start, suspend or cancel a TRIM.
    Trim { pool: String, devices: Vec<PathBuf>, order: TrimOrder, wait: bool },
    /// Wait until background activities end: the named ones, or all.
    Wait { name: String, activities: Vec<String> },
    /// Make all writes durable.
    Sync { names: Vec<String> },
    /// Clear the errors of devices.
    Clear { name: String, device: Option<PathBuf> },
    /// Remove the labels of a device.
    LabelClear { device: PathBuf, force: bool },
    /// Print the label of a device for udev.
    Probe { device: PathBuf },
    /// Show the on-disk structures.
    Inspect { target: Target, wanted: Wanted },
    /// Check all structures and checksums.
    Check { target: Target },
    /// Show the formats and features, or the pools that lack some, or enable them.
    Upgrade { list: bool, all: bool, names: Vec<String> },
    /// Print the version.
    Version { json: bool },
    /// A verb that is not supported.
    Unserved(UnservedCall),
}

/// An imported pool, or one that is opened from its devices.
#[derive(Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name or GUID; may be missing where devices are named.
    pub name: Option<String>,
    /// Where to search for its devices.
    pub places: Vec<PathBuf>,
}

/// A pool to create.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ToCreate {
    pub name: String,
    pub devices: Vec<PathBuf>,
    pub groups: args::Groups,
    pub size: Option<u64>,
    pub force: bool,
    pub only_say: bool,
    pub properties: Vec<(String, String)>,
    pub root_properties: Vec<(String, String)>,
    pub altroot: Option<PathBuf>,
    pub cache: Option<u64>,
    pub survive: bool,
}

/// Pools to import.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ToImport {
    pub name: Option<String>,
    /// Import the pool at the named location.
    pub at: bool,
    pub new: Option<String>,
    pub all: bool,
    pub destroyed: bool,
    pub places: Vec<PathBuf>,
    /// File in which the locations of pools are recorded.
    pub cachefile: Option<PathBuf>,
    pub properties: Vec<(String, String)>,
    pub altroot: Option<PathBuf>,
    pub force: bool,
    /// Trust the content although other writers of the bucket exist.
    pub trust: bool,
    pub rewind: bool,
    pub temporary: bool,
    /// Import even where log devices are missing.
    pub without_log: bool,
    pub txg: Option<u64>,
    pub only_say: bool,
    pub mount: bool,
    pub cache: Option<u64>,
    pub survive: bool,
    pub foreground: bool,
}

/// Repetition of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Again {
    /// Seconds between tables; `None`: one table.
    pub interval: Option<f64>,
    /// Number of tables; `None`: until interrupted.
    pub count: Option<u64>,
    /// Time before each table: `u`: seconds since 1970, `d`: a date.
    pub time: Option<char>,
    /// Omit the first table, which covers the time since the import.
    pub not_since_import: bool,
    /// Print headings over the first table only.
    pub headings_once: bool,
}

impl Eq for Again {}

fn paths(matches: &ArgMatches, name: &str) -> Vec<PathBuf> {
    matches.get_many::<OsString>(name).into_iter().flatten().map(PathBuf::from).collect()
}

fn text(matches: &ArgMatches, name: &str) -> Option<String> {
    matches.get_one::<String>(name).cloned()
}

fn list_of(matches: &ArgMatches, name: &str) -> Option<Vec<String>> {
    text(matches, name).map(|list| list.split(',').map(|one| one.trim().to_owned()).collect())
}

fn bytes(matches: &ArgMatches, name: &str) -> Result<Option<u64>, Failure> {
    use nacre_pool::properties::size;
    let parse =
        |text: String| size::parse(&text).map_err(|error| Failure::usage(format!("{name}: {error}")).next(size::FORM));
    text(matches, name).map(parse).transpose()
}

/// Returns whether a flag is set; `false` where the verb does not have it.
fn has(matches: &ArgMatches, name: &str) -> bool {
    matches.try_get_one::<bool>(name).ok().flatten().copied().unwrap_or(false)
}

fn form_of(matches: &ArgMatches) -> PoolForm {
    let has = |name: &str| has(matches, name);
    let integers = has("integers");
    PoolForm {
        scripted: has("scripted"),
        exact: has("exact") || integers,
        json: has("json"),
        integers,
        by_guid: has("by-guid"),
        called: called_of(matches),
    }
}

fn called_of(matches: &ArgMatches) -> Called {
    Called {
        by_guid: has(matches, "called-guid"),
        resolved: has(matches, "called-real"),
        whole: has(matches, "called-path"),
    }
}

/// Parses names with `[INTERVAL [COUNT]]` after them.
fn names_again(matches: &ArgMatches) -> Result<(Vec<String>, Again), Failure> {
    let (names, interval, count) = args::interval(texts(matches, "POOL"))?;
    let time = text(matches, "time").and_then(|text| text.chars().next());
    let (not_since_import, headings_once) = (has(matches, "-y"), has(matches, "headings-once"));
    Ok((names, Again { interval, count, time, not_since_import, headings_once }))
}

fn target_of(matches: &ArgMatches) -> Target {
    Target { name: text(matches, "POOL"), places: paths(matches, "places") }
}

/// Parses the matched arguments of `nacre pool`.
///
/// # Errors
/// A value that does not fit, or options that cannot go together.
pub fn parse(matches: &ArgMatches) -> Result<PoolVerb, Failure> {
    let Some((verb, matches)) = matches.subcommand() else {
        return Err(Failure::usage("a command is needed").next("nacre pool --help lists them"));
    };
    let pool = || text(matches, "POOL").unwrap_or_default();
    let names = || texts(matches, "POOL");
    let flag = |name| matches.get_flag(name);
    Ok(match verb {
        "create" => PoolVerb::Create(to_create(matches)?),
        "destroy" => PoolVerb::Destroy { name: pool(), force: flag("force") },
        "list" => {
            let (names, again) = names_again(matches)?;
            PoolVerb::List {
                form: form_of(matches),
                columns: list_of(matches, "columns"),
                verbose: flag("verbose"),
                names,
                everybody: flag("all-users"),
                again,
            }
        }
        "status" => {
            let (names, again) = names_again(matches)?;
            let shown = status::StatusView {
                form: form_of(matches),
                flat: flag("flat"),
                verbose: flag("verbose"),
                trim: flag("trim"),
                only_ill: flag("ill"),
                ill_devices: flag("ill-devices"),
                scripts: text(matches, "scripts"),
            };
            PoolVerb::Status { shown, names, everybody: flag("all-users"), again }
        }
        "add" => {
            for (name, value) in args::assignments(&texts(matches, "properties"))? {
                let parsed = properties::parse(&name, &value, true);
                if name != "ashift" || parsed.is_err() {
                    let why = parsed.map_or_else(
                        |error| error.to_string(),
                        |_| format!("property '{name}' is none of devices: there is ashift"),
                    );
                    return Err(Failure::new(format!("cannot add to '{}': {why}", pool())));
                }
            }
            let (devices, groups) = args::grouped(paths(matches, "DEVICE"), flag("force"), true)?;
            PoolVerb::Add {
                name: pool(),
                devices,
                groups,
                size: bytes(matches, "size")?,
                force: flag("force"),
                only_say: flag("only-say"),
                called: called_of(matches),
            }
        }
        "import" => PoolVerb::Import(to_import(matches)?),
        "export" => PoolVerb::Export { names: names(), all: flag("all"), force: flag("force") },
        "get" => PoolVerb::Get {
            form: form_of(matches),
            fields: list_of(matches, "fields"),
            properties: list_of(matches, "PROPERTIES").unwrap_or_default(),
            names: names(),
        },
        "set" => {
            let (name, value) = args::assignment(&text(matches, "PROPERTY").unwrap_or_default())?;
            if let Some(device) = text(matches, "DEVICE") {
                return Err(Failure::new(format!(
                    "cannot set property for '{device}' of '{}': devices have none to be set",
                    pool()
                )));
            }
            PoolVerb::Set { name, value, pool: pool() }
        }
        "history" => PoolVerb::History { names: names(), internal: flag("internal"), long: flag("long") },
        "events" => PoolVerb::Events {
            name: text(matches, "POOL"),
            follow: flag("follow"),
            verbose: flag("verbose"),
            scripted: flag("scripted"),
            clear: flag("clear"),
        },
        "iostat" => {
            let (names, again) = names_again(matches)?;
            let histograms = match (flag("times"), flag("sizes")) {
                (true, _) => Some(Of::Times),
                (_, true) => Some(Of::Sizes),
                _ => None,
            };
            let shown = IostatColumns { latency: flag("latency"), queue: flag("queue"), histograms };
            PoolVerb::Iostat { form: form_of(matches), verbose: flag("verbose"), shown, names, again }
        }
        "scrub" => {
            let order = match (flag("stop"), flag("pause")) {
                (true, _) => ScrubOrder::Stop,
                (_, true) => ScrubOrder::Pause,
                _ if flag("errors") => ScrubOrder::StartOf(Extent::Errors),
                _ if flag("continue") => ScrubOrder::StartOf(Extent::New),
                _ => ScrubOrder::Start,
            };
            let rate = bytes(matches, "rate")?;
            PoolVerb::Scrub { names: names(), all: flag("all"), order, rate, wait: flag("wait") }
        }
        "wait" => {
            let all = texts(matches, "activity");
            if let Some(other) = all.iter().find(|activity| {
                ![
                    "scrub",
                    "resilver",
                    "free",
                    "initialize",
                    "replace",
                    "remove",
                    "raidz_expand",
                    "convert",
                    "rebalance",
                    "trim",
                    "discard",
                ]
                .contains(&activity.as_str())
            }) {
                return Err(Failure::usage(format!("there is no activity '{other}'"))
                    .next("scrub, resilver, remove, raidz_expand, convert, rebalance, trim, free"));
            }
            PoolVerb::Wait { name: pool(), activities: all }
        }
        "sync" => PoolVerb::Sync { names: names() },
        "trim" if flag("secure") => {
            return Err(Failure::new(format!(
                "cannot trim '{}': devices are not made to forget for good (-d)",
                pool()
            )));
        }
        "trim" => {
            let rate = match bytes(matches, "rate")? {
                Some(0) => return Err(Failure::usage("rate: with 0 bytes a second it would never end")),
                rate => rate.unwrap_or(0),
            };
            let order = match (flag("cancel"), flag("suspend")) {
                (true, _) => TrimOrder::Cancel,
                (_, true) => TrimOrder::Suspend,
                _ => TrimOrder::Start { rate },
            };
            PoolVerb::Trim { pool: pool(), devices: paths(matches, "DEVICE"), order, wait: flag("wait") }
        }
        "clear" if flag("rewind") => {
            let why = "a pool that is imported has lost nothing that could be gone back to";
            return Err(
                Failure::usage(why).next("nacre pool import -F goes back, where a pool cannot be imported otherwise")
            );
        }
        "clear" => PoolVerb::Clear { name: pool(), device: paths(matches, "DEVICE").pop() },
        "online" => {
            let (name, devices) = (pool(), paths(matches, "DEVICE"));
            match matches.get_flag("expand") {
                true => PoolVerb::Expand { name, devices },
                false if devices.is_empty() => return Err(Failure::usage("missing device name")),
                false => PoolVerb::Online { name, devices },
            }
        }
        "offline" => PoolVerb::Offline { name: pool(), devices: paths(matches, "DEVICE") },
        "replace" => {
            let mut named = paths(matches, "DEVICE").into_iter();
            let old = named.next().ok_or_else(|| Failure::usage("missing old device"))?;
            let new = args::devices(vec![named.next().unwrap_or_else(|| old.clone())])?;
            let (size, force, wait) = (bytes(matches, "size")?, flag("force"), flag("wait"));
            PoolVerb::Replace { name: pool(), old, new: new.into_iter().next().unwrap_or_default(), size, force, wait }
        }
        "attach" => {
            let mut named = paths(matches, "DEVICE").into_iter();
            let beside = named.next().unwrap_or_default();
            let new = args::devices(named.collect())?.pop().unwrap_or_default();
            let (size, force, wait) = (bytes(matches, "size")?, flag("force"), flag("wait"));
            PoolVerb::Attach { name: pool(), beside, new, size, force, only_say: flag("only-say"), wait }
        }
        "detach" => PoolVerb::Detach { name: pool(), device: paths(matches, "DEVICE").pop().unwrap_or_default() },
        "remove" | "convert" | "rebalance" | "reshape" | "plan" => match changing::parse(verb, matches)? {
            Some(what) => PoolVerb::Changing(what),
            None => return Err(Failure::usage(format!("unknown command {verb}"))),
        },
        "labelclear" => PoolVerb::LabelClear {
            device: args::devices(paths(matches, "DEVICE"))?.pop().unwrap_or_default(),
            force: flag("force"),
        },
        "probe" => PoolVerb::Probe { device: args::devices(paths(matches, "DEVICE"))?.pop().unwrap_or_default() },
        "inspect" => {
            let wanted = Wanted {
                segments: flag("segments"),
                frames: matches.get_one::<u32>("frames").copied(),
                rows: text(matches, "rows"),
            };
            PoolVerb::Inspect { target: target_of(matches), wanted }
        }
        "check" => PoolVerb::Check { target: target_of(matches) },
        "upgrade" => PoolVerb::Upgrade { list: flag("list"), all: flag("all"), names: names() },
        "version" => PoolVerb::Version { json: flag("json") },
        other => PoolVerb::Unserved(UnservedCall::read(other, &paths(matches, "REST"))?),
    })
}

fn to_create(matches: &ArgMatches) -> Result<ToCreate, Failure> {
    let mut root_properties = args::assignments(&texts(matches, "root-properties"))?;
    if let Some(mountpoint) = text(matches, "mountpoint") {
        root_properties.retain(|(name, _)| name != "mountpoint");
        root_properties.push(("mountpoint".to_owned(), mountpoint));
    }
    let mut properties = args::assignments(&texts(matches, "properties"))?;
    let altroot = altroot_of(matches, &mut properties)?;
    let (devices, groups) = args::grouped(paths(matches, "DEVICE"), matches.get_flag("force"), false)?;
    let settings = way_of(matches)?;
    let devices = devices.into_iter().map(|place| args::whole_address(place, &settings)).collect::<Result<_, _>>()?;
    Ok(ToCreate {
        name: text(matches, "POOL").unwrap_or_default(),
        devices,
        groups,
        size: bytes(matches, "size")?,
        force: matches.get_flag("force"),
        only_say: matches.get_flag("only-say"),
        properties,
        root_properties,
        altroot,
        cache: bytes(matches, "cache")?,
        survive: matches.get_flag("survive"),
    })
}

/// Returns `-R`, or the property `altroot`, which is not stored.
fn altroot_of(matches: &ArgMatches, properties: &mut Vec<(String, String)>) -> Result<Option<PathBuf>, Failure> {
    let place = properties.iter().position(|(name, _)| name == "altroot");
    let property = place.map(|place| PathBuf::from(properties.remove(place).1));
    let altroot = matches.get_one::<OsString>("altroot").map(PathBuf::from).or(property);
    match altroot.as_ref().filter(|altroot| !altroot.is_absolute()) {
        Some(relative) => {
            Err(Failure::new(format!("bad alternate root '{}': must be an absolute path", relative.display())))
        }
        None => Ok(altroot),
    }
}

/// Returns the settings of the object store.
fn way_of(matches: &ArgMatches) -> Result<nacre_remote::Settings, Failure> {
    let path = |name| paths(matches, name).pop();
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|error| Failure::io("cannot resolve", path.display(), &error))
    };
    Ok(nacre_remote::Settings {
        endpoint: text(matches, "endpoint"),
        account: text(matches, "account"),
        region: text(matches, "region"),
        profile: text(matches, "profile"),
        credentials_file: path("credentials-file").map(absolute).transpose()?,
        cache_dir: path("cache-dir").map(absolute).transpose()?,
        cache_size: bytes(matches, "cache-size")?,
        log_dir: path("log-dir").map(absolute).transpose()?,
    })
}

fn to_import(matches: &ArgMatches) -> Result<ToImport, Failure> {
    let settings = way_of(matches)?;
    let mut places = paths(matches, "places");
    // An address identifies its pool.
    let mut name = text(matches, "POOL");
    let at = name.take_if(|name| nacre_remote::is_address(name.as_ref()));
    places.extend(at.iter().map(PathBuf::from));
    let alone = at.is_some();
    let places = match places.iter().any(|place| nacre_remote::is_address(place)) {
        true => places.into_iter().map(|place| args::whole_address(place, &settings)).collect::<Result<_, _>>()?,
        false if settings == nacre_remote::Settings::default() => places,
        false => return Err(Failure::usage(args::OF_STORES)),
    };
    let mut properties = args::assignments(&texts(matches, "properties"))?;
    let altroot = altroot_of(matches, &mut properties)?;
    let import = ToImport {
        name,
        at: alone,
        new: text(matches, "NEW"),
        all: matches.get_flag("all"),
        destroyed: matches.get_flag("destroyed"),
        places,
        cachefile: paths(matches, "cachefile").pop(),
        properties,
        altroot,
        force: matches.get_flag("force"),
        trust: matches.get_flag("trust"),
        rewind: matches.get_flag("rewind"),
        temporary: matches.get_flag("temporary"),
        without_log: matches.get_flag("without-log"),
        txg: matches.get_one::<u64>("txg").copied(),
        only_say: matches.get_flag("only-say"),
        mount: !matches.get_flag("no-mounts"),
        cache: bytes(matches, "cache")?,
        survive: matches.get_flag("survive"),
        foreground: matches.get_flag("foreground"),
    };
    if import.all && import.name.is_some() {
        return Err(Failure::usage("-a imports all pools: none is to be named"));
    }
    if import.foreground && import.name.is_none() && !import.at {
        return Err(Failure::usage("--foreground is for one pool, which is to be named"));
    }
    if import.all && import.at {
        return Err(Failure::usage("-a imports all pools: none is to be named"));
    }
    if import.temporary && import.new.is_none() {
        return Err(Failure::usage("-t wants a name: nacre pool import -t POOL NEWNAME"));
    }
    if import.only_say && !import.rewind {
        return Err(Failure::usage("-n goes with -F: what would be given up is said"));
    }
    Ok(import)
}
