//! Carries out topology changes of pools ([`super::changing`]).

use super::{
    args,
    called::named_device,
    changing::Changing,
    run::{done, list_of, not_in_use, say},
};
use nacre_admin::pool::{Figures, GroupFigures, Intended, PoolRequest, ReshapeOrder, figures::LOG};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::client::{self, Owned},
};
use std::path::{Path, PathBuf};

/// Carries out a verb.
pub fn run(what: Changing, command: &str) -> Result<(), Failure> {
    let end = |owned: &Owned, wait: bool| if wait { done(owned, "", PoolRequest::AwaitReshape(None)) } else { Ok(()) };
    match what {
        Changing::Remove { name, devices, force, only_say, exact, wait } => {
            let owned = client::owned(&name)?;
            let (figures, devices) = (list_of(&owned)?, parts(&owned, "remove", devices)?);
            let (devices, holding): (Vec<PathBuf>, Vec<PathBuf>) =
                devices.into_iter().partition(|part| goes_at_once(&figures, part));
            if only_say {
                for device in devices {
                    say(&format!("removal of {} from '{name}':\n  to be moved  nothing", device.display()));
                }
                return if holding.is_empty() { Ok(()) } else { plan(&owned, Intended::Remove(holding), exact) };
            }
            let told = if holding.is_empty() { command } else { "" };
            // Data devices come first, since their removal may be refused: then nothing has
            // changed.
            if !holding.is_empty() {
                changed(&owned, command, PoolRequest::Leave { devices: holding, force })?;
            }
            if !devices.is_empty() {
                done(&owned, told, PoolRequest::Remove { devices })?;
            }
            end(&owned, wait)
        }
        Changing::Convert { name, group, to, devices, only_say: true, .. } => {
            let owned = client::owned(&name)?;
            let group = parts(&owned, "convert", vec![group])?.pop().unwrap_or_default();
            plan(&owned, Intended::Convert { group, to, devices }, false)
        }
        Changing::Convert { name, group, to, devices, size, force, wait, .. } => {
            let owned = client::owned(&name)?;
            let group = parts(&owned, "convert", vec![group])?.pop().unwrap_or_default();
            if size.is_none() {
                not_in_use(&devices)?;
            }
            changed(&owned, command, PoolRequest::Convert { group, to, devices, size, force })?;
            end(&owned, wait)
        }
        Changing::Rebalance { name, only_say: true, .. } => plan(&client::owned(&name)?, Intended::Rebalance, false),
        Changing::Rebalance { name, rate, wait, .. } => {
            let owned = client::owned(&name)?;
            changed(&owned, command, PoolRequest::Rebalance)?;
            if let Some(rate) = rate {
                done(&owned, "", PoolRequest::Reshape(ReshapeOrder::Rate(rate)))?;
            }
            end(&owned, wait)
        }
        Changing::Reshape { name, order, wait } => {
            let owned = client::owned(&name)?;
            done(&owned, command, PoolRequest::Reshape(order))?;
            end(&owned, wait)
        }
        Changing::Plan { name, verb, words, exact } => {
            let owned = client::owned(&name)?;
            let mut words = words.into_iter();
            let intended = match verb.as_str() {
                "remove" => Intended::Remove(parts(&owned, "remove", words.collect())?),
                "attach" => {
                    let group = parts(&owned, "attach", words.next().into_iter().collect())?.pop().unwrap_or_default();
                    let new = args::devices(words.collect())?;
                    let new = new.into_iter().next().ok_or_else(|| Failure::usage("missing new device"))?;
                    Intended::Attach { group, new }
                }
                "convert" => {
                    let group = parts(&owned, "convert", words.next().into_iter().collect())?.pop().unwrap_or_default();
                    let to =
                        words.next().ok_or_else(|| Failure::usage("missing kind: mirror, raidz1, raidz2 or raidz3"))?;
                    let devices = args::devices(words.collect())?;
                    Intended::Convert { group, to: to.to_string_lossy().into_owned(), devices }
                }
                "rebalance" => Intended::Rebalance,
                _ => {
                    let (devices, groups) = args::grouped(words.collect(), true, true)?;
                    Intended::Add { devices, groups }
                }
            };
            plan(&owned, intended, exact)
        }
    }
}

/// Requests a change and prints the pool's notes about its effect.
fn changed(owned: &Owned, command: &str, request: PoolRequest) -> Result<(), Failure> {
    owned.pool(command, request, &mut say).map(drop)
}

/// Returns whether a part is removed without moving data: a spare, or a part of the log.
fn goes_at_once(figures: &Figures, part: &Path) -> bool {
    let at = figures.devices.iter().position(|device| part == Path::new(&device.path));
    let is_spare = at.and_then(|at| figures.devices.get(at)).is_some_and(|device| !device.role.is_empty());
    let concerns =
        |group: &GroupFigures| part == Path::new(&group.name) || at.is_some_and(|at| group.devices.contains(&at));
    is_spare || figures.groups.iter().any(|group| group.class == LOG && concerns(group))
}

/// Reports the effect of a change.
///
/// # Errors
/// The change is impossible.
pub fn plan(owned: &Owned, intended: Intended, exact: bool) -> Result<(), Failure> {
    owned.pool("", PoolRequest::Plan { intended, exact }, &mut say).map(drop)
}

/// Returns the paths under which the pool knows devices, and the names of groups.
pub fn parts(owned: &Owned, verb: &str, words: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    let figures = list_of(owned)?;
    let part = |word: PathBuf| {
        if let Some(group) = group_called(&figures, &word) {
            return Ok(PathBuf::from(group));
        }
        let device = named_device(&figures, &word).map(|device| PathBuf::from(&device.path));
        device.ok_or_else(|| {
            Failure::new(format!("cannot {verb} {}: no such device in pool", word.display())).exit(Exit::NotFound)
        })
    };
    words.into_iter().map(part).collect()
}

/// Returns the name of the group that `word` names.
fn group_called<'a>(figures: &'a Figures, word: &Path) -> Option<&'a str> {
    let word = word.to_str()?;
    figures.groups.iter().map(|group| group.name.as_str()).find(|name| *name == word)
}

/// Returns whether a word names a group.
pub fn is_group(owned: &Owned, word: &Path) -> Result<bool, Failure> {
    Ok(group_called(&list_of(owned)?, word).is_some())
}
