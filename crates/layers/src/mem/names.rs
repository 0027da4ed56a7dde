//! Names of the tree in memory: look-up, links, removal, rename. All changes of names are called
//! with the tree's lock `names` held.

use super::inode::Inode;
use nacre_vfs::{Errno, Kind, Name, RenameFlags, Result, Time};
use std::sync::Arc;

/// A directory and a name in it.
type MemPlace<'a> = (&'a Arc<Inode>, Name<'a>);

/// Looks up a name; `None` if there is no such name.
pub(super) fn find(parent: &Arc<Inode>, name: Name<'_>) -> Result<Option<Arc<Inode>>> {
    Ok(parent.body.lock().directory()?.get(name.bytes()))
}

/// Inserts a new name. ENOENT in a removed directory.
pub(super) fn insert(parent: &Arc<Inode>, name: Name<'_>, inode: &Arc<Inode>, now: Time) -> Result<()> {
    let mut body = parent.body.lock();
    if body.nlink == 0 {
        return Err(Errno::ENOENT);
    }
    body.directory()?.put(name.bytes(), Arc::clone(inode));
    if inode.kind == Kind::Directory {
        body.nlink += 1;
    }
    (body.mtime, body.ctime) = (now, now);
    Ok(())
}

/// Removes a name. Its file loses a link.
fn take(parent: &Arc<Inode>, name: Name<'_>, inode: &Arc<Inode>, now: Time) -> Result<()> {
    {
        let mut body = parent.body.lock();
        body.directory()?.take(name.bytes());
        if inode.kind == Kind::Directory {
            body.nlink -= 1;
        }
        (body.mtime, body.ctime) = (now, now);
    }
    let mut body = inode.body.lock();
    body.nlink = if inode.kind == Kind::Directory { 0 } else { body.nlink.saturating_sub(1) };
    body.ctime = now;
    Ok(())
}

pub(super) fn link(inode: &Arc<Inode>, parent: &Arc<Inode>, name: Name<'_>, now: Time) -> Result<()> {
    if inode.kind == Kind::Directory {
        return Err(Errno::EPERM);
    }
    if find(parent, name)?.is_some() {
        return Err(Errno::EEXIST);
    }
    {
        let body = inode.body.lock();
        if body.nlink == 0 && !body.linkable {
            return Err(Errno::ENOENT);
        }
    }
    insert(parent, name, inode, now)?;
    let mut body = inode.body.lock();
    body.nlink += 1;
    body.linkable = false;
    body.ctime = now;
    Ok(())
}

pub(super) fn unlink(parent: &Arc<Inode>, name: Name<'_>, now: Time) -> Result<()> {
    let inode = find(parent, name)?.ok_or(Errno::ENOENT)?;
    if inode.kind == Kind::Directory {
        return Err(Errno::EISDIR);
    }
    take(parent, name, &inode, now)
}

pub(super) fn rmdir(parent: &Arc<Inode>, name: Name<'_>, now: Time) -> Result<()> {
    let inode = find(parent, name)?.ok_or(Errno::ENOENT)?;
    check_empty(&inode)?;
    take(parent, name, &inode, now)
}

fn check_empty(inode: &Arc<Inode>) -> Result<()> {
    if inode.body.lock().directory()?.is_empty() { Ok(()) } else { Err(Errno::ENOTEMPTY) }
}

/// Whether `directory` is `below` itself or one of its ancestors.
fn holds(directory: &Arc<Inode>, below: &Arc<Inode>) -> Result<bool> {
    let mut at = Some(Arc::clone(below));
    while let Some(inode) = at {
        if Arc::ptr_eq(&inode, directory) {
            return Ok(true);
        }
        at = inode.body.lock().directory()?.parent.upgrade();
    }
    Ok(false)
}

pub(super) fn rename(from: MemPlace<'_>, to: MemPlace<'_>, flags: RenameFlags, now: Time) -> Result<()> {
    let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
    if flags.0 & !known != 0 || flags.has(known) {
        return Err(Errno::EINVAL);
    }
    let source = find(from.0, from.1)?.ok_or(Errno::ENOENT)?;
    let target = find(to.0, to.1)?;
    if flags.has(RenameFlags::NOREPLACE) && target.is_some() {
        return Err(Errno::EEXIST);
    }
    if flags.has(RenameFlags::EXCHANGE) && target.is_none() {
        return Err(Errno::ENOENT);
    }
    if source.kind == Kind::Directory && holds(&source, to.0)? {
        return Err(Errno::EINVAL);
    }
    if let Some(target) = &target
        && target.kind == Kind::Directory
        && holds(target, from.0)?
    {
        return Err(if flags.has(RenameFlags::EXCHANGE) { Errno::EINVAL } else { Errno::ENOTEMPTY });
    }
    match target {
        // Two names of one file: nothing happens (rename(2)).
        Some(target) if Arc::ptr_eq(&source, &target) => Ok(()),
        Some(target) if flags.has(RenameFlags::EXCHANGE) => exchange(from, &source, to, &target, now),
        target => replace(from, &source, to, target.as_ref(), now),
    }
}

fn replace(
    from: MemPlace<'_>,
    source: &Arc<Inode>,
    to: MemPlace<'_>,
    target: Option<&Arc<Inode>>,
    now: Time,
) -> Result<()> {
    if to.0.body.lock().nlink == 0 {
        return Err(Errno::ENOENT);
    }
    if let Some(target) = target {
        match (source.kind, target.kind) {
            (Kind::Directory, Kind::Directory) => check_empty(target)?,
            (Kind::Directory, _) => return Err(Errno::ENOTDIR),
            (_, Kind::Directory) => return Err(Errno::EISDIR),
            _ => {}
        }
    }
    // A replaced name keeps its position in listings, and so does a file that is renamed within its
    // directory.
    let place = match target {
        Some(_) => place(to)?,
        None if Arc::ptr_eq(from.0, to.0) => place(from)?,
        None => None,
    };
    if let Some(target) = target {
        take(to.0, to.1, target, now)?;
    }
    leave(from, source, now)?;
    insert(to.0, to.1, source, now)?;
    move_to(to, place)?;
    arrive(source, to.0, now)
}

fn place((parent, name): MemPlace<'_>) -> Result<Option<u64>> {
    Ok(parent.body.lock().directory()?.place(name.bytes()))
}

fn move_to((parent, name): MemPlace<'_>, place: Option<u64>) -> Result<()> {
    if let Some(place) = place {
        parent.body.lock().directory()?.move_to(name.bytes(), place);
    }
    Ok(())
}

fn exchange(from: MemPlace<'_>, source: &Arc<Inode>, to: MemPlace<'_>, target: &Arc<Inode>, now: Time) -> Result<()> {
    let places = (place(from)?, place(to)?);
    leave(from, source, now)?;
    leave(to, target, now)?;
    insert(from.0, from.1, target, now)?;
    move_to(from, places.0)?;
    insert(to.0, to.1, source, now)?;
    move_to(to, places.1)?;
    arrive(source, to.0, now)?;
    arrive(target, from.0, now)
}

/// Removes a name from its directory; its file keeps its links.
fn leave((parent, name): MemPlace<'_>, inode: &Arc<Inode>, now: Time) -> Result<()> {
    let mut body = parent.body.lock();
    body.directory()?.take(name.bytes());
    if inode.kind == Kind::Directory {
        body.nlink -= 1;
    }
    (body.mtime, body.ctime) = (now, now);
    Ok(())
}

/// Updates a file that got a new parent.
fn arrive(inode: &Arc<Inode>, parent: &Arc<Inode>, now: Time) -> Result<()> {
    let mut body = inode.body.lock();
    body.ctime = now;
    if inode.kind == Kind::Directory {
        body.directory()?.parent = Arc::downgrade(parent);
    }
    Ok(())
}
