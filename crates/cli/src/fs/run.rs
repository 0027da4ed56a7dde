//! Carries out the commands of file systems: sends requests to the processes that own the pools,
//! and prints the answers.

use super::{
    args,
    ask::{all_mounted, ask},
    command::{self, FsVerb, Show, TableForm},
    json, list, owners, value,
};
use crate::{
    columns::{self, Align},
    output::print,
    pool::{
        chosen::{each, once},
        run::typed,
        version::version,
        zfs_usage,
    },
};
use nacre_admin::fs::{
    Destroyed, FsAnswer, FsRequest, ListedObject, Listing, Scheduled, ToCreate, ToDestroy, ToHold, ToMount, ToSchedule,
    ToSet, ToSnapshot, ToUnmount, Types,
};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::{
        client::{self, Owned},
        expected::{self, Expected},
    },
    report::tell,
    runtime::Whose,
};
use nacre_pool::properties::size::human_bytes;
use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    path::PathBuf,
    process::ExitCode,
};

/// The name of the program when it was called as `zfs`.
pub const ZFS: &str = "zfs";

/// Runs the program as `zfs`: with the command lines of `nacre fs`.
pub fn as_zfs(arguments: Vec<OsString>) -> ExitCode {
    let table = command::command().name(ZFS).bin_name(ZFS).version(env!("CARGO_PKG_VERSION"));
    let arguments = zfs_usage::with_help(arguments);
    let matches =
        match table.clone().try_get_matches_from(std::iter::once(OsString::from(ZFS)).chain(arguments.iter().cloned()))
        {
            Ok(matches) => matches,
            Err(error) => return zfs_usage::report(&error, &table, &arguments),
        };
    let done = command::parse(&matches).and_then(|verb| run(verb, &typed(ZFS)));
    done.unwrap_or_else(|failure| zfs_usage::refuse(&failure, ZFS, &table, &arguments))
}

/// Carries out a verb.
///
/// # Errors
/// The failure of a request, or output that cannot be written.
pub fn run(verb: FsVerb, command: &str) -> Result<ExitCode, Failure> {
    match verb {
        FsVerb::Show(show) => return self::show(&show),
        FsVerb::Ask { pool, request } => return Ok(incomplete(&done(ask(&pool, command, request)?))),
        FsVerb::Create { what, verbose, parsable } => return create(what, verbose, parsable, command),
        FsVerb::Destroy { what, verbose, parsable } => destroy(what, verbose, parsable, command)?,
        FsVerb::Set(what) => {
            return of_each(what.names.clone(), command, |names| FsRequest::Set(ToSet { names, ..what.clone() }));
        }
        FsVerb::Snapshot(what) => snapshot(what, command)?,
        FsVerb::Schedule { what, verbose } => schedule(what, verbose, command)?,
        FsVerb::Hold(what) => {
            return of_each(what.snapshots.clone(), command, |snapshots| {
                FsRequest::Hold(ToHold { snapshots, ..what.clone() })
            });
        }
        FsVerb::Holds { snapshots, recursive, form } => holds(&snapshots, recursive, form)?,
        FsVerb::Mounted { json } => mounted(json)?,
        FsVerb::MountAll(what) => return of_all(command, &FsRequest::Mount(what)),
        FsVerb::MountBelow { name, what } => return mount_below(name, &what, command),
        FsVerb::Unmount { what, force } => return unmount(what, force, command),
        FsVerb::Share(None) => return of_all(command, &FsRequest::Share(None)),
        FsVerb::Share(Some(name)) => {
            let request = FsRequest::Share(Some(name.clone()));
            return Ok(incomplete(&done(ask(args::pool(&name), command, request)?)));
        }
        FsVerb::Unshare(what) => return unshare(what, command),
        FsVerb::Diff { pool, from, to, form } => super::diff::run(&pool, from, to, form)?,
        FsVerb::Versions(verb) => return super::versions::run(&verb),
        FsVerb::Replicate(what) => return super::replicate::run(&what),
        FsVerb::Stream(verb) => return super::streams::run(verb, command),
        FsVerb::Space(order) => super::space::run(&order)?,
        FsVerb::Nothing => {}
        FsVerb::Upgrade => print("All filesystems are formatted with the current version: that of their pool.\n")?,
        FsVerb::Version { json } => print(&version(ZFS, command, json))?,
        FsVerb::Allowed(name) => {
            // A name that does not exist has to be an error all the same.
            let listing = Listing { depth: Some(0), properties: Some(Vec::new()), ..Listing::default() };
            gather(&listing, &[name], false)?.1.map_or(Ok(()), Err)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn done(answer: FsAnswer) -> Vec<String> {
    match answer {
        FsAnswer::Done(sentences) => sentences,
        _ => Vec::new(),
    }
}

/// Prints what could not be done; returns the exit code of a failure where there is any.
fn incomplete(sentences: &[String]) -> ExitCode {
    for sentence in sentences {
        tell(sentence);
    }
    if sentences.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(Exit::Failure as u8) }
}

/// Groups names by their pools; within a pool the order stays.
fn by_pool(names: Vec<String>) -> BTreeMap<String, Vec<String>> {
    let mut pools: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        pools.entry(args::pool(&name).to_owned()).or_default().push(name);
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
        } else {
            // The process of the pool may be of an older version, which knows fewer names of the
            // property.
            *name = args::long_name(name);
        }
    }
    let (mut objects, failure) = gather(&listing, &show.names, show.everybody)?;
    if show.get.is_some() {
        objects.iter_mut().for_each(|listed| list::name_it(listed, show.listing.properties.as_deref()));
    }
    list::sort(&mut objects, &show.order);
    let typed = |name: &str| typed_names.get(name).cloned().unwrap_or_else(|| name.to_owned());
    let columns: Vec<String> =
        show.listing.properties.iter().flatten().map(|name| owners::resolved(name)).collect::<Result<_, _>>()?;
    let text = match &show.get {
        Some(get) if show.form.json => {
            json::datasets("get", &objects, show.form, &|listed| json::wanted(listed, get), &typed)
        }
        Some(get) => list::properties(&objects, get, show.form, &typed),
        None if show.form.json => {
            json::datasets("list", &objects, show.form, &|listed| json::columns(listed, &columns), &typed)
        }
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

fn listed(owned: &Owned, listing: Listing) -> Result<Vec<ListedObject>, Failure> {
    match owned.fs("", FsRequest::List(listing), &mut |_| {})? {
        FsAnswer::Listed(listed) => Ok(listed),
        _ => Ok(Vec::new()),
    }
}

/// Returns the objects of all names, and a failure where some of them could not be listed.
fn gather(
    listing: &Listing,
    names: &[String],
    everybody: bool,
) -> Result<(Vec<ListedObject>, Option<Failure>), Failure> {
    let mut objects: Vec<ListedObject> = Vec::new();
    let mut failure: Option<Failure> = None;
    let mut note = |found: Failure| {
        if let Some(before) = failure.replace(found) {
            tell(&before.what);
        }
    };
    if names.is_empty() {
        // A pool that does not answer does not hide the others.
        let wanted = listing.clone();
        let (answers, failures) =
            client::ask_each(client::all(&Whose::told(everybody)), move |owned| listed(owned, wanted.clone()));
        objects.extend(answers.into_iter().flatten());
        failures.into_iter().for_each(&mut note);
        // As with ZFS, a pool whose process has ended does not make the command fail.
        for lost in expected::lost(&[]).iter().map(Expected::failure) {
            [lost.what, lost.next].iter().for_each(|line| tell(line));
        }
    }
    // Each name by itself: the existing ones are shown.
    for name in names {
        let name = path_or_name(name)?;
        let one = client::owned(args::pool(&name)).map_err(|failure| no_pool(failure, &name));
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

/// Turns a missing pool into ZFS' message, which does not distinguish it from a missing dataset.
fn no_pool(failure: Failure, name: &str) -> Failure {
    if failure.exit == Exit::NotFound {
        return Failure { what: format!("cannot open '{name}': dataset does not exist"), ..failure };
    }
    failure
}

/// Returns the name of the file system that a path is in; names unchanged.
fn path_or_name(name: &str) -> Result<String, Failure> {
    if !name.starts_with('/') && !name.starts_with("./") {
        return Ok(name.to_owned());
    }
    let path = std::fs::canonicalize(name).map_err(|error| {
        Failure::io("cannot open", name, &error).next("name a file system, or a path in one that is mounted")
    })?;
    let (mounted, missing) = all_mounted();
    let inside = mounted
        .into_iter()
        .filter(|mounted| path.starts_with(&mounted.at))
        .max_by_key(|mounted| mounted.at.components().count());
    match inside {
        Some(mounted) => Ok(mounted.name),
        None => Err(missing.unwrap_or_else(|| {
            Failure::new(format!("cannot open '{name}': not a ZFS filesystem"))
                .next("no pool has a file system mounted there")
                .exit(Exit::NotFound)
        })),
    }
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
    let pool = args::pool(&what.name);
    client::owned(pool).map_err(|failure| match failure.exit {
        Exit::NotFound => {
            // ZFS prints no hint here, and scripts compare the output.
            let next = if command.starts_with(ZFS) { String::new() } else { failure.next };
            Failure { what: format!("cannot create '{}': no such pool '{pool}'", what.name), next, ..failure }
        }
        _ => failure,
    })?;
    let sentences = done(ask(pool, command, FsRequest::Create(what.clone()))?);
    print(&text)?;
    Ok(incomplete(&sentences))
}

fn destroy(what: ToDestroy, verbose: bool, parsable: bool, command: &str) -> Result<(), Failure> {
    let dry = what.dry;
    let answer = ask(args::pool(&what.target), command, FsRequest::Destroy(what.clone()))?;
    let FsAnswer::Destroyed(Destroyed { names, freed, missing }) = answer else { return Ok(()) };
    missing.iter().for_each(|name| tell(&format!("could not find snapshot '{name}' to destroy")));
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

/// Sends a request for each name separately, as ZFS does: a failure does not prevent the others.
fn of_each(names: Vec<String>, command: &str, request: impl Fn(Vec<String>) -> FsRequest) -> Result<ExitCode, Failure> {
    let (mut last, mut sentences) = (None, Vec::new());
    each(&mut last, once(names), |name| {
        let pool = args::pool(&name).to_owned();
        sentences.extend(done(ask(&pool, command, request(vec![name]))?));
        Ok(())
    });
    let code = incomplete(&sentences);
    last.map_or(Ok(code), Err)
}

fn snapshot(what: ToSnapshot, command: &str) -> Result<(), Failure> {
    for (pool, names) in by_pool(what.names.clone()) {
        ask(&pool, command, FsRequest::Snapshot(ToSnapshot { names, ..what.clone() }))?;
    }
    Ok(())
}

/// Runs a schedule. Snapshots that cannot be destroyed are reported without failing: the next run
/// tries again.
fn schedule(what: ToSchedule, verbose: bool, command: &str) -> Result<(), Failure> {
    let would = if what.dry { "would " } else { "" };
    for (pool, names) in by_pool(what.names.clone()) {
        let request = FsRequest::Schedule(ToSchedule { names, ..what.clone() });
        let FsAnswer::Scheduled(Scheduled { taken, destroyed, stay }) = ask(&pool, command, request)? else { continue };
        for (name, why) in stay {
            tell(&format!("{name} stays: {why}"));
        }
        if verbose {
            let taken = taken.iter().map(|name| format!("{would}create {name}\n"));
            print(&taken.chain(destroyed.iter().map(|name| format!("{would}destroy {name}\n"))).collect::<String>())?;
        }
    }
    Ok(())
}

fn holds(snapshots: &[String], recursive: bool, form: TableForm) -> Result<(), Failure> {
    let (mut all, mut missing) = (Vec::new(), None);
    each(&mut missing, once(snapshots.to_vec()), |snapshot| {
        let pool = args::pool(&snapshot).to_owned();
        if let FsAnswer::Holds(holds) = ask(&pool, "", FsRequest::Holds { snapshots: vec![snapshot], recursive })? {
            all.extend(holds);
        }
        Ok(())
    });
    // In the order of `list`.
    let place = |snapshot: &str| snapshot.split(['/', '@']).map(str::to_owned).collect::<Vec<_>>();
    all.sort_by_cached_key(|hold| place(&hold.snapshot));
    if form.json {
        print(&json::holds(&all, form))?;
        return missing.map_or(Ok(()), Err);
    }
    let since = |seconds: i64| if form.exact { seconds.to_string() } else { value::date(seconds) };
    let rows: Vec<Vec<String>> = all.into_iter().map(|hold| vec![hold.snapshot, hold.tag, since(hold.since)]).collect();
    let heads = [("NAME", Align::Left), ("TAG", Align::Left), ("TIMESTAMP", Align::Left)];
    match form.scripted {
        true => print(&columns::scripted(&rows))?,
        false if rows.is_empty() => {}
        false => print(&columns::aligned(&heads, &rows, false))?,
    }
    missing.map_or(Ok(()), Err)
}

fn mounted(as_json: bool) -> Result<(), Failure> {
    let (all, missing) = all_mounted();
    match as_json {
        true => print(&json::mounted(&all))?,
        false => print(
            &all.iter().map(|mounted| format!("{:<30}  {}\n", mounted.name, mounted.at.display())).collect::<String>(),
        )?,
    }
    missing.map_or(Ok(()), Err)
}

/// Mounts the file system that mount(8) asks for.
///
/// # Errors
/// The failure of the request.
pub fn mount(what: ToMount) -> Result<ExitCode, Failure> {
    let name = what.name.clone().unwrap_or_default();
    Ok(incomplete(&done(ask(args::pool(&name), "", FsRequest::Mount(what))?)))
}

/// Sends a request to all pools of this user; a failure does not prevent the others.
fn of_all(command: &str, request: &FsRequest) -> Result<ExitCode, Failure> {
    let (mut last, mut sentences) = (None, Vec::new());
    each(&mut last, client::ours(), |owned| {
        sentences.extend(done(owned.fs(command, request.clone(), &mut tell)?));
        Ok(())
    });
    let code = incomplete(&sentences);
    last.map_or(Ok(code), Err)
}

/// Mounts a file system and its descendants, as far as their properties allow it and they are not
/// mounted yet; parents first, in the order of the list.
fn mount_below(name: String, what: &ToMount, command: &str) -> Result<ExitCode, Failure> {
    let wanted = ["mounted", "canmount", "mountpoint"].map(str::to_owned).to_vec();
    let types = Some(Types { filesystems: true, ..Types::default() });
    let (found, failure) = gather(&Listing { types, properties: Some(wanted), ..Listing::default() }, &[name], false)?;
    failure.map_or(Ok(()), Err)?;
    let asks = |listed: &ListedObject| {
        let is = |name: &str, values: &[&str]| {
            let value =
                listed.values.iter().find(|shown| shown.property == name).and_then(|shown| shown.value.as_deref());
            value.is_some_and(|value| values.contains(&value))
        };
        is("mounted", &["no"]) && is("canmount", &["on"]) && !is("mountpoint", &["none", "legacy"])
    };
    let names = found.iter().filter(|listed| asks(listed)).map(|listed| listed.name.clone()).collect();
    of_each(names, command, |names| FsRequest::Mount(ToMount { name: names.into_iter().next(), ..what.clone() }))
}

fn unmount(what: Option<String>, force: bool, command: &str) -> Result<ExitCode, Failure> {
    of_mounts(what, command, "unmount", &|what| FsRequest::Unmount { what, force })
}

fn unshare(what: Option<String>, command: &str) -> Result<ExitCode, Failure> {
    of_mounts(what, command, "unshare", &FsRequest::Unshare)
}

/// Sends a request about mounts: of a name, of a path, or of all pools.
fn of_mounts(
    what: Option<String>,
    command: &str,
    verb: &str,
    request: &dyn Fn(ToUnmount) -> FsRequest,
) -> Result<ExitCode, Failure> {
    let Some(name) = what else {
        return of_all(command, &request(ToUnmount::All));
    };
    if !name.starts_with('/') {
        ask(args::pool(&name), command, request(ToUnmount::Name(name.clone())))?;
        return Ok(ExitCode::SUCCESS);
    }
    // No component of the path is looked up, so that a mount that does not answer can be named.
    let at = PathBuf::from(&name);
    let at: PathBuf = at.components().collect();
    let (mounted, missing) = all_mounted();
    let found = mounted.into_iter().find(|mounted| mounted.at == at);
    let found = found.ok_or_else(|| {
        missing.unwrap_or_else(|| {
            Failure::new(format!("cannot {verb} '{name}': not a mountpoint"))
                .exit(Exit::NotFound)
                .next("'nacre fs mount' shows what is mounted")
        })
    })?;
    ask(args::pool(&found.name), command, request(ToUnmount::At(at)))?;
    Ok(ExitCode::SUCCESS)
}
