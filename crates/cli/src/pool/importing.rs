//! `nacre pool import`: the list of importable pools, and the choice among them.

use super::{
    find::{self, Candidate, Search},
    starting,
    verb::{Target, ToImport},
};
use crate::{clock, output::print};
use nacre_admin::{
    Imported,
    pool::{PoolAnswer, PoolRequest, devices},
};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::{
        cachefile, client, known, process,
        rewind::{EarlierState, older},
        start::{How, Start, program},
    },
    report::{printable, tell},
};
use nacre_pool::{label::PoolState, names, store::Access};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// Deadline for devices that another process is releasing.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Interval between two searches.
const AGAIN: Duration = Duration::from_millis(20);

/// Imports pools, or shows the importable ones.
///
/// # Errors
/// No such pool, or the reason why it cannot be imported.
pub fn import(what: ToImport, command: &str) -> Result<ExitCode, Failure> {
    let places = absolute(&what.places)?;
    let noted = what.cachefile.as_deref().map(cachefile::devices).transpose()?;
    let mut search = search(&places, noted.as_deref(), what.name.as_deref());
    if !what.destroyed && !what.all {
        refuse_rest(&search, &what)?;
    }
    search.pools.retain(|pool| (pool.identity.state == PoolState::Destroyed) == what.destroyed);
    for (path, why) in &search.refused {
        tell(&format!("{}: {}", find::shown(path), printable(why.as_bytes())));
    }
    if what.all {
        return all(&search, &what, command);
    }
    if what.at {
        let [candidate] = search.pools.as_slice() else {
            // The reason has been printed by the search.
            if what.places.iter().any(|place| search.is_unreachable(place)) {
                let what = format!("cannot import from '{}': the store cannot be reached", names_of(&what.places));
                return Err(Failure::new(what).next("it may be there all the same: import it again when that answers"));
            }
            let what = format!("cannot import from '{}': no such pool available", names_of(&what.places));
            return Err(Failure::new(what).exit(Exit::NotFound));
        };
        return one(candidate, what.new.clone(), &what, command);
    }
    let Some(wanted) = &what.name else {
        if search.pools.is_empty() {
            tell("no pools available to import");
            return Ok(if search.refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        let texts: Vec<String> = search.pools.iter().map(Candidate::text).collect();
        print(&texts.join("\n"))?;
        return Ok(ExitCode::SUCCESS);
    };
    let candidate = choose(&search, wanted)?;
    one(candidate, what.new.clone(), &what, command)
}

/// Refuses to import a destroyed pool in a bucket where no other pool is meant, with a hint how to
/// remove its objects.
fn refuse_rest(search: &Search, what: &ToImport) -> Result<(), Failure> {
    let is_meant = |pool: &&Candidate| match &what.name {
        Some(wanted) => pool.is_meant(wanted),
        None => what.at,
    };
    let mut meant = search.pools.iter().filter(is_meant);
    let (Some(pool), None) = (meant.next(), meant.next()) else { return Ok(()) };
    let Some(place) = pool.devices.values().find(|place| nacre_remote::is_address(place)) else { return Ok(()) };
    if pool.identity.state != PoolState::Destroyed {
        return Ok(());
    }
    let (name, at) = (printable(pool.identity.name.as_bytes()), printable(find::shown(place).as_bytes()));
    let wanted = match &what.name {
        Some(_) => name.clone(),
        None => format!("'{}'", printable(place.as_os_str().as_encoded_bytes())),
    };
    let what = format!("cannot import '{name}': it is destroyed, but objects of it are still in '{at}'");
    Err(Failure::new(what).exit(Exit::NotFound).next(format!("`nacre pool destroy {wanted}` removes them")))
}

fn names_of(places: &[PathBuf]) -> String {
    let name = |place: &PathBuf| printable(find::shown(place).as_bytes());
    places.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn absolute(places: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let resolve = |place: &PathBuf| {
        if nacre_remote::is_address(place) {
            return Ok(place.clone());
        }
        let path =
            std::path::absolute(place).map_err(|error| Failure::io("cannot resolve", place.display(), &error))?;
        match std::fs::symlink_metadata(&path) {
            Ok(_) => Ok(path),
            Err(error) => Err(Failure::io("cannot open", place.display(), &error)
                .next("-d names a device, an image file, or a directory that they lie in")),
        }
    };
    places.iter().map(resolve).collect()
}

/// Searches for pools. A process that was killed a moment ago may still hold the devices of the
/// wanted pool: the search is repeated until a short deadline.
fn search(places: &[PathBuf], noted: Option<&[(PathBuf, u64)]>, wanted: Option<&str>) -> Search {
    let until = clock::now() + PATIENCE;
    loop {
        let found = find::search(places, noted, wanted);
        let there =
            wanted.is_none_or(|wanted| found.pools.iter().any(|pool| pool.is_meant(wanted)) || client::lives(wanted));
        if there || !found.busy || clock::now() >= until {
            return found;
        }
        // The kernel has no notification for the release of files by a killed process.
        clock::pause(AGAIN);
    }
}

/// Returns the pool with this name or GUID.
fn choose<'a>(search: &'a Search, wanted: &str) -> Result<&'a Candidate, Failure> {
    let fits = |candidate: &&Candidate| candidate.is_meant(wanted);
    let doing = format!("cannot import '{}'", printable(wanted.as_bytes()));
    let mut found = search.pools.iter().filter(fits);
    match (found.next(), found.next()) {
        (Some(_), Some(_)) => {
            Err(Failure::new(format!("{doing}: more than one matching pool")).next("import by numeric ID instead"))
        }
        (Some(one), None) => Ok(one),
        (None, _) => {
            if client::find(wanted).is_some() {
                let why = "a pool with that name is already created/imported,\nand no additional pools with that name were found";
                return Err(Failure::new(format!("{doing}: {why}")).exit(Exit::Busy));
            }
            let places = known::places_of(wanted);
            if let Some(place) = places.iter().find(|place| search.is_unreachable(place)) {
                let place = printable(find::shown(place).as_bytes());
                return Err(Failure::new(format!("{doing}: '{place}' cannot be reached"))
                    .next("it is there as far as this machine knows: import it again when that answers"));
            }
            let is_path = wanted.contains('/') && Path::new(wanted).exists();
            let next = match is_path {
                true => format!("-d {} takes the pool of this device or directory", printable(wanted.as_bytes())),
                false => "-d names a directory or a device to look at; -D finds pools that were destroyed".to_owned(),
            };
            Err(Failure::new(format!("{doing}: no such pool available")).exit(Exit::NotFound).next(next))
        }
    }
}

fn all(search: &Search, what: &ToImport, command: &str) -> Result<ExitCode, Failure> {
    let mut code = ExitCode::SUCCESS;
    if search.pools.is_empty() {
        tell("no pools available to import");
    }
    for candidate in &search.pools {
        // The failure of a pool is printed; the others are imported all the same.
        match one(candidate, None, what, command) {
            Ok(ended) if ended == ExitCode::SUCCESS => {}
            Ok(ended) => code = ended,
            Err(failure) => code = failure.report(program(command)),
        }
    }
    Ok(code)
}

fn one(candidate: &Candidate, new: Option<String>, what: &ToImport, command: &str) -> Result<ExitCode, Failure> {
    let old = candidate.identity.name.clone();
    let doing = format!("cannot import '{}'", printable(old.as_bytes()));
    let name = new.unwrap_or_else(|| old.clone());
    names::check_new_pool(&name)
        .map_err(|error| Failure::new(format!("cannot import '{}': {error}", printable(name.as_bytes()))))?;
    if client::lives(&name) {
        return Err(Failure::new(format!("{doing}: a pool with that name already exists"))
            .exit(Exit::Busy)
            .next(format!("`nacre pool import {old} NEWNAME` gives it another name")));
    }
    if let Some((a, b)) = &candidate.twins {
        return Err(Failure::new(format!(
            "{doing}: '{}' and '{}' are copies of the same device",
            a.display(),
            b.display()
        ))
        .exit(Exit::Busy)
        .next("name the one that is meant: -d FILE"));
    }
    if let Some(why) = candidate.refused() {
        let missing: Vec<String> =
            candidate.missing().iter().map(|path| printable(path.as_os_str().as_encoded_bytes())).collect();
        let why =
            if missing.is_empty() { printable(why.as_bytes()) } else { format!("missing: {}", missing.join(", ")) };
        let next = format!("{why}\n`nacre pool import` shows them; -d says where to look");
        return Err(Failure::new(format!("{doing}: one or more devices is currently unavailable")).next(next));
    }
    let lost = candidate.missing_logs();
    if !lost.is_empty() && !what.without_log {
        let list = lost.iter().map(|line| format!("\n\t{line}")).collect::<String>();
        let next = format!("The devices below are missing or corrupted, use '-m' to import the pool anyway:{list}");
        let what = format!("{doing}: one or more devices is currently unavailable");
        return Err(
            Failure::new(what).next(format!("{next}\nWhat was synced last, and only they have, is given up then."))
        );
    }
    let mut properties = starting::check_properties(&doing, &what.properties)?;
    let read_only = properties
        .iter()
        .position(|(name, _)| name == "readonly")
        .is_some_and(|place| properties.remove(place).1 == "on");
    if let Some(user) = candidate.user().filter(|_| !what.force && !read_only) {
        return Err(Failure::new(format!("{doing}: pool was previously in use from another system."))
            .exit(Exit::Busy)
            .next(format!("{user}\nThe pool can be imported, use 'nacre pool import -f' to import the pool.")));
    }
    let devices: Vec<PathBuf> = candidate.devices.values().cloned().collect();
    if what.only_say {
        return foresee(&doing, &devices);
    }
    let (txg, rewind, temporary) = (what.txg, what.rewind, what.temporary);
    // For a pool in a bucket, -f takes it over from another machine, but does not mark its content
    // as trusted.
    let is_in_bucket = devices.iter().any(|device| nacre_remote::is_address(device));
    let trusted = what.trust || (what.force && !is_in_bucket);
    let how = How::Import {
        old,
        read_only,
        txg,
        rewind,
        temporary,
        force: what.force,
        trusted,
        without_log: what.without_log,
    };
    let (altroot, cache) = (what.altroot.clone(), starting::cache(what.cache)?);
    let imported = name.clone();
    let code = starting::start(Start {
        name,
        devices,
        how,
        properties,
        altroot,
        mount: what.mount,
        cache,
        command: command.to_owned(),
        survive: what.survive,
        foreground: what.foreground,
    })?;
    if code == ExitCode::SUCCESS && what.mount { all_mounted(&imported).map(|()| code) } else { Ok(code) }
}

/// Checks that all file systems of a newly imported pool are mounted; its process has reported the
/// others.
///
/// # Errors
/// Some are not mounted; the pool is imported all the same.
fn all_mounted(name: &str) -> Result<(), Failure> {
    let PoolAnswer::Listed(figures) = client::owned(name)?.pool("", PoolRequest::List, &mut tell)? else {
        return Ok(());
    };
    if figures.unmounted == 0 {
        return Ok(());
    }
    let name = printable(name.as_bytes());
    Err(Failure::new(format!(
        "'{name}' is imported, but {} of its file systems could not be mounted",
        figures.unmounted
    ))
    .next("`nacre fs mount -a` mounts them when the reason is gone"))
}

/// Reports the effect of `-F` without importing.
fn foresee(doing: &str, paths: &[PathBuf]) -> Result<ExitCode, Failure> {
    let opened = devices::open_home(paths, false).map_err(starting::failed)?;
    match Imported::open(opened.clone(), Access::ReadOnly, None, process::opening(starting::CACHE, None)) {
        Ok(_) => print("the last state can be read: nothing would be given up\n")?,
        Err(refusal) => {
            tell(&format!("{doing}: {}", refusal.what));
            let states: Vec<String> = older(&opened)?.iter().map(EarlierState::text).collect();
            print(&format!(
                "would go back to the newest of these transaction groups that can be read: {}\n",
                states.join(", ")
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens a pool in this process, read-only.
///
/// # Errors
/// No pool is found, or several are.
pub fn read_only(target: &Target, access: Access) -> Result<Imported, Failure> {
    let search = find::search(&absolute(&target.places)?, None, None);
    let candidate = match (&target.name, search.pools.as_slice()) {
        (Some(name), _) => choose(&search, name)?,
        (None, [one]) => one,
        (None, []) => return Err(Failure::new("there is no pool that is not in use").exit(Exit::NotFound)),
        (None, _) => return Err(Failure::usage("which pool? there are several")),
    };
    let paths: Vec<PathBuf> = candidate.devices.values().cloned().collect();
    let opened = devices::open_home(&paths, false).map_err(starting::failed)?;
    Imported::open(opened, access, None, process::opening(starting::CACHE, None)).map_err(starting::failed)
}
