//! `share` and `unshare`: network shares of mounts, by `sharenfs` and `sharesmb`. Mounts are shared
//! when they are made; these verbs are for servers that were started later, and for a temporary end
//! of sharing.

use super::ToUnmount;
use super::objects::Objects;
use crate::{Imported, Kind, Mounts, Progress, Refusal, What};

/// Shares one file system, or all whose properties ask for it; returns a sentence for each of all that failed.
pub(super) fn share(pool: &Imported, mounts: &dyn Mounts, name: Option<&str>) -> Result<Vec<String>, Refusal> {
    let Some(name) = name else {
        let wanted = mounts.mounted().into_iter().filter(|mounted| mounted.options.sharing.is_wanted());
        let heads = wanted.filter(|mounted| mounted.what.snapshot.is_none());
        return Ok(heads.filter_map(|mounted| mounts.share(mounted.what.dataset).err()).map(|why| why.what).collect());
    };
    let (id, sharing) = {
        let objects = Objects::now(pool, mounts);
        let id = objects.filesystem("open", name)?;
        (id, objects.mounted(id).map(|mounted| mounted.options.sharing.clone()))
    };
    let refuse = |why: &str| Refusal::new(Kind::Invalid, format!("cannot share '{name}': {why}"));
    match sharing {
        None => Err(refuse("filesystem not mounted").next(format!("nacre fs mount {name}"))),
        Some(sharing) if !sharing.is_wanted() => {
            Err(refuse("legacy share").next(format!("nacre fs set sharenfs=on {name}, or sharesmb=on")))
        }
        Some(_) => mounts.share(id).map(|()| Vec::new()),
    }
}

/// Ends shares.
pub(super) fn unshare(pool: &Imported, mounts: &dyn Mounts, what: &ToUnmount) -> Result<(), Refusal> {
    let refuse = |name: &str, why: &str| Refusal::new(Kind::Invalid, format!("cannot unshare '{name}': {why}"));
    let one = match what {
        ToUnmount::All => {
            let heads = mounts.mounted().into_iter().map(|mounted| mounted.what);
            heads.filter(|what| what.snapshot.is_none()).for_each(|What { dataset, .. }| mounts.unshare(dataset));
            return Ok(());
        }
        ToUnmount::Name(name) => {
            let objects = Objects::now(pool, mounts);
            let id = objects.filesystem("open", name)?;
            let shared = objects.mounted(id).is_some_and(|mounted| mounted.options.sharing.is_wanted());
            shared.then_some(id).ok_or_else(|| refuse(name, "not currently shared"))?
        }
        ToUnmount::At(at) => Objects::now(pool, mounts)
            .mounted_at(at)
            .ok_or_else(|| refuse(&at.to_string_lossy(), "not currently shared"))?,
    };
    mounts.unshare(one);
    Ok(())
}

/// Reports the file systems from this one down that are not shared although they should be.
pub(super) fn tell_failures(
    pool: &Imported,
    mounts: &dyn Mounts,
    id: u64,
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let below = Objects::now(pool, mounts).descendants(id)?;
    for id in below {
        if let Some(why) = mounts.share_failure(id) {
            let name = Objects::now(pool, mounts).known(id)?.name.clone();
            progress.note(&format!("'{name}' is not shared: {why}"));
        }
    }
    Ok(())
}
