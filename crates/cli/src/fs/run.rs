//! Carries out what a command line asked of file systems: asks the process of each pool, prints what it answers.

use super::{
    command::{self, Form, FsOrder, Show},
    json, list, owners, value, words,
};
use crate::{
    columns::{self, Align},
    commands::Order,
    failure::{Exit, Failure},
    pool::{
        client::{self, Owned},
        manners,
        run::{tell, typed},
    },
    run::print,
};
use nacre_admin::fs::{
    Answer, Destroyed, Listed, Listing, MountedAt, Request, ToCreate, ToDestroy, ToHold, ToMount, ToSet, ToSnapshot, ToUnmount,
};
use nacre_pool::properties::size::human_bytes;
use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    path::PathBuf,
    process::ExitCode,
};

/// What the program says when it was called as `zfs`.
pub const ZFS: &str = "zfs";

/// Called as `zfs`: the same command lines.
pub fn as_zfs(arguments: Vec<OsString>) -> ExitCode {
    let table = command::command().name(ZFS).bin_name(ZFS).version(env!("CARGO_PKG_VERSION"));
    // What ZFS takes for help.
    let arguments = arguments.into_iter().map(|word| if word == "-?" { OsString::from("--help") } else { word });
    let arguments: Vec<OsString> = arguments.collect();
    let matches = match table.clone().try_get_matches_from(std::iter::once(OsString::from(ZFS)).chain(arguments.iter().cloned())) {
        Ok(matches) => matches,
        Err(error) => return manners::report(&error, &table, &arguments),
    };
    let done = match command::order(&matches) {
        Ok(Order::Fs(order)) => self::order(order, &typed(ZFS)),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(failure) => Err(failure),
    };
    done.unwrap_or_else(|failure| manners::refuse(&failure, ZFS, &table, &arguments))
}

/// Does it.
///
/// # Errors
/// Why not.
pub fn order(order: FsOrder, command: &str) -> Result<ExitCode, Failure> {
    match order {
        FsOrder::Show(show) => return self::show(&show),
        FsOrder::Ask { pool, request } => return Ok(incomplete(&done(ask(&pool, command, request)?))),
        FsOrder::Create { what, verbose, parsable } => return create(what, verbose, parsable, command),
        FsOrder::Destroy { what, verbose, parsable } => destroy(what, verbose, parsable, command)?,
        FsOrder::Set(what) => return set(what, command),
        FsOrder::Snapshot(what) => snapshot(what, command)?,
        FsOrder::Hold(what) => hold(what, command)?,
        FsOrder::Holds { snapshots, recursive, form } => holds(&snapshots, recursive, form)?,
        FsOrder::Mounted { json } => mounted(json)?,
        FsOrder::MountAll(what) => return mount_all(&what, command),
        FsOrder::Unmount { what, force } => unmount(what, force, command)?,
        FsOrder::Diff { pool, from, to, form } => super::diff::run(&pool, from, to, form)?,
        FsOrder::Space(order) => super::space::run(&order)?,
        FsOrder::Version => print(&format!("nacre {}\n", env!("CARGO_PKG_VERSION")))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the process that owns a pool.
pub fn ask(pool: &str, command: &str, request: Request) -> Result<Answer, Failure> {
    if pool.is_empty() {
        return Err(Failure::new("a name begins with that of a pool: POOL/NAME, without a slash before it"));
    }
    client::owned(pool)?.fs(command, request, &mut tell)
}

fn done(answer: Answer) -> Vec<String> {
    match answer {
        Answer::Done(sentences) => sentences,
        _ => Vec::new(),
    }
}

/// What was done but for something: that is told, and the exit code is not that of success.
fn incomplete(sentences: &[String]) -> ExitCode {
    for sentence in sentences {
        tell(sentence);
    }
    if sentences.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(Exit::Failure as u8) }
}

/// Names by their pools, in the order in which they came.
fn by_pool(names: Vec<String>) -> BTreeMap<String, Vec<String>> {
    let mut pools: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        pools.entry(words::pool(&name).to_owned()).or_default().push(name);
    }
    pools
}

fn show(show: &Show) -> Result<ExitCode, Failure> {
    let mut typed_names = HashMap::new();
    let mut listing = Listing { properties: list::asked(show), ..show.listing.clone() };
    for name in listing.properties.iter_mut().flatten() {
        let resolved = owners::resolved(name)?;
        if resolved != *name {
            typed_names.insert(resolved.clone(), name.clone());
            *name = resolved;
        }
    }
    let (mut objects, failure) = gather(&listing, &show.names)?;
    list::sort(&mut objects, &show.order);
    let typed = |name: &str| typed_names.get(name).cloned().unwrap_or_else(|| name.to_owned());
    let columns: Vec<String> = show.listing.properties.iter().flatten().map(|name| owners::resolved(name)).collect::<Result<_, _>>()?;
    let text = match &show.get {
        Some(get) if show.form.json => json::datasets("get", &objects, show.form, &|listed| json::wanted(listed, get), &typed),
        Some(get) => list::properties(&objects, get, show.form, &typed),
        None if show.form.json => json::datasets("list", &objects, show.form, &|listed| json::columns(listed, &columns), &typed),
        None if objects.is_empty() => {
            if failure.is_none() && !show.form.scripted {
                tell("no datasets available");
            }
            String::new()
        }
        None => list::table(&objects, &columns, show.form),
    };
    print(&text)?;
    match failure {
        Some(failure) => Err(failure),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn listed(owned: &Owned, listing: Listing) -> Result<Vec<Listed>, Failure> {
    match owned.fs("", Request::List(listing), &mut tell)? {
        Answer::Listed(listed) => Ok(listed),
        _ => Ok(Vec::new()),
    }
}

/// The objects of all names, and why some of them could not be had.
fn gather(listing: &Listing, names: &[String]) -> Result<(Vec<Listed>, Option<Failure>), Failure> {
    let mut objects: Vec<Listed> = Vec::new();
    let mut failure: Option<Failure> = None;
    let mut note = |found: Failure| {
        if let Some(before) = failure.replace(found) {
            tell(&before.what);
        }
    };
    if names.is_empty() {
        // One that does not answer hides no others.
        for owned in client::all() {
            match listed(&owned, listing.clone()) {
                Ok(found) => objects.extend(found),
                Err(_) if owned.gone() => {}
                Err(found) => note(found),
            }
        }
    }
    // Each for itself: those that are there are shown.
    for name in names {
        let name = path_or_name(name)?;
        let one = client::owned(words::pool(&name)).map_err(|failure| no_pool(failure, &name));
        match one.and_then(|owned| listed(&owned, Listing { names: vec![name], ..listing.clone() })) {
            Ok(found) => objects.extend(found),
            Err(found) => note(found),
        }
    }
    if names.len() > 1 {
        let mut seen = std::collections::HashSet::new();
        objects.retain(|object| seen.insert(object.name.clone()));
    }
    Ok((objects, failure))
}

/// ZFS does not tell a pool that is not there from a file system that is not.
fn no_pool(failure: Failure, name: &str) -> Failure {
    if failure.exit == Exit::NotFound {
        return Failure { what: format!("cannot open '{name}': dataset does not exist"), ..failure };
    }
    failure
}

/// A path stands for the file system that it is in.
fn path_or_name(name: &str) -> Result<String, Failure> {
    if !name.starts_with('/') && !name.starts_with("./") {
        return Ok(name.to_owned());
    }
    let path = std::fs::canonicalize(name).map_err(|error| Failure::io("cannot open", name, &error))?;
    let mounted = all_mounted()?;
    let inside = mounted.into_iter().filter(|mounted| path.starts_with(&mounted.at)).max_by_key(|mounted| mounted.at.components().count());
    match inside {
        Some(mounted) => Ok(mounted.name),
        None => Err(Failure::new(format!("cannot open '{name}': not a ZFS filesystem"))
            .next("no pool has a file system mounted there")
            .exit(Exit::NotFound)),
    }
}

fn all_mounted() -> Result<Vec<MountedAt>, Failure> {
    let mut all = Vec::new();
    for owned in client::all() {
        match owned.fs("", Request::Mounted, &mut tell) {
            Ok(Answer::Mounted(mounted)) => all.extend(mounted),
            Ok(_) => {}
            // It was let go just now.
            Err(_) if owned.gone() => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(all)
}

fn create(what: ToCreate, verbose: bool, parsable: bool, command: &str) -> Result<ExitCode, Failure> {
    let mut text = match (parsable, verbose, what.dry) {
        (true, ..) => format!("create\t{}\n", what.name),
        (_, true, true) => format!("would create {}\n", what.name),
        (_, true, false) => format!("create {}\n", what.name),
        _ => String::new(),
    };
    for (name, value) in &what.properties {
        match (parsable, verbose) {
            (true, _) => text.push_str(&format!("property\t{name}\t{value}\n")),
            (_, true) => text.push_str(&format!("\t{name}={value}\n")),
            _ => {}
        }
    }
    let pool = words::pool(&what.name);
    if client::find(pool).is_none() {
        return Err(Failure::new(format!("cannot create '{}': no such pool '{pool}'", what.name)).exit(Exit::NotFound));
    }
    let sentences = done(ask(pool, command, Request::Create(what.clone()))?);
    print(&text)?;
    Ok(incomplete(&sentences))
}

fn destroy(what: ToDestroy, verbose: bool, parsable: bool, command: &str) -> Result<(), Failure> {
    let dry = what.dry;
    let Answer::Destroyed(Destroyed { names, freed }) = ask(words::pool(&what.target), command, Request::Destroy(what.clone()))? else {
        return Ok(());
    };
    if !verbose && !parsable {
        return Ok(());
    }
    let bookmark = what.target.contains('#');
    let mut text = String::new();
    for name in names {
        text.push_str(&match (parsable, dry) {
            (true, _) => format!("destroy\t{name}\n"),
            (false, true) => format!("would destroy {name}\n"),
            (false, false) => format!("will destroy {name}\n"),
        });
    }
    if !bookmark {
        text.push_str(&match (parsable, dry) {
            (true, _) => format!("reclaim\t{freed}\n"),
            (false, true) => format!("would reclaim {}\n", human_bytes(freed)),
            (false, false) => format!("will reclaim {}\n", human_bytes(freed)),
        });
    }
    print(&text)
}

fn set(what: ToSet, command: &str) -> Result<ExitCode, Failure> {
    let mut sentences = Vec::new();
    for (pool, names) in by_pool(what.names.clone()) {
        sentences.extend(done(ask(&pool, command, Request::Set(ToSet { names, ..what.clone() }))?));
    }
    Ok(incomplete(&sentences))
}

fn snapshot(what: ToSnapshot, command: &str) -> Result<(), Failure> {
    for (pool, names) in by_pool(what.names.clone()) {
        ask(&pool, command, Request::Snapshot(ToSnapshot { names, ..what.clone() }))?;
    }
    Ok(())
}

fn hold(what: ToHold, command: &str) -> Result<(), Failure> {
    for (pool, snapshots) in by_pool(what.snapshots.clone()) {
        ask(&pool, command, Request::Hold(ToHold { snapshots, ..what.clone() }))?;
    }
    Ok(())
}

fn holds(snapshots: &[String], recursive: bool, form: Form) -> Result<(), Failure> {
    let mut all = Vec::new();
    for (pool, snapshots) in by_pool(snapshots.to_vec()) {
        if let Answer::Holds(holds) = ask(&pool, "", Request::Holds { snapshots, recursive })? {
            all.extend(holds);
        }
    }
    // As `list` has them.
    let place = |snapshot: &str| snapshot.split(['/', '@']).map(str::to_owned).collect::<Vec<_>>();
    all.sort_by_cached_key(|hold| place(&hold.snapshot));
    if form.json {
        return print(&json::holds(&all, form));
    }
    let since = |seconds: i64| if form.exact { seconds.to_string() } else { value::date(seconds) };
    let rows: Vec<Vec<String>> = all.into_iter().map(|hold| vec![hold.snapshot, hold.tag, since(hold.since)]).collect();
    if form.scripted {
        return print(&columns::scripted(&rows));
    }
    if rows.is_empty() {
        return Ok(());
    }
    print(&columns::aligned(&[("NAME", Align::Left), ("TAG", Align::Left), ("TIMESTAMP", Align::Left)], &rows, false))
}

fn mounted(as_json: bool) -> Result<(), Failure> {
    let all = all_mounted()?;
    if as_json {
        return print(&json::mounted(&all));
    }
    print(&all.iter().map(|mounted| format!("{:<30}  {}\n", mounted.name, mounted.at.display())).collect::<String>())
}

/// What mount(8) asks for.
///
/// # Errors
/// Why not.
pub fn mount(what: ToMount) -> Result<ExitCode, Failure> {
    let name = what.name.clone().unwrap_or_default();
    Ok(incomplete(&done(ask(words::pool(&name), "", Request::Mount(what))?)))
}

fn mount_all(what: &ToMount, command: &str) -> Result<ExitCode, Failure> {
    let mut sentences = Vec::new();
    for owned in client::ours() {
        sentences.extend(done(owned.fs(command, Request::Mount(what.clone()), &mut tell)?));
    }
    Ok(incomplete(&sentences))
}

fn unmount(what: Option<String>, force: bool, command: &str) -> Result<(), Failure> {
    let Some(name) = what else {
        for owned in client::ours() {
            owned.fs(command, Request::Unmount { what: ToUnmount::All, force }, &mut tell)?;
        }
        return Ok(());
    };
    if !name.starts_with('/') {
        return ask(words::pool(&name), command, Request::Unmount { what: ToUnmount::Name(name.clone()), force }).map(drop);
    }
    // Nothing is looked up on the way: a mount that does not answer can be named all the same.
    let at = PathBuf::from(&name);
    let at: PathBuf = at.components().collect();
    let found = all_mounted()?.into_iter().find(|mounted| mounted.at == at);
    let found = found.ok_or_else(|| {
        Failure::new(format!("cannot unmount '{name}': not a mountpoint"))
            .exit(Exit::NotFound)
            .next("'nacre fs mount' shows what is mounted")
    })?;
    ask(words::pool(&found.name), command, Request::Unmount { what: ToUnmount::At(at), force }).map(drop)
}
