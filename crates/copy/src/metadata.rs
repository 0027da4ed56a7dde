//! Metadata of a file: owner, mode, times, extended attributes with access control lists, file flags.

use crate::{
    figures::add,
    job::Job,
    trouble::{During, Trouble},
};
use nacre_sys::{
    inode, ioctls,
    xattrat::{self, Target},
};
use rustix::{
    fs::{self, AtFlags, FileType, Gid, Mode, Statx, StatxAttributes, StatxFlags, Timespec, Timestamps, Uid},
    io::Errno,
};
use std::{io, os::fd::BorrowedFd};

/// The access control list that new entries of a directory inherit.
pub(crate) const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
/// Attributes that are aliases: another name of access control lists on XFS.
const SHADOWS: [&[u8]; 2] = [b"trusted.SGI_ACL_FILE", b"trusted.SGI_ACL_DEFAULT"];
/// Labels that the destination's own policy may set; copied, but neither required nor removed.
const SELINUX: &[u8] = b"security.selinux";
/// `XATTR_SIZE_MAX` and `XATTR_LIST_MAX`.
const ATTRIBUTE_MAX: usize = 65_536;
/// The file flags that are copied, as in chattr(1): immutable, append-only, no dump (include/uapi/linux/fs.h).
const FLAGS: [(StatxAttributes, u32); 3] =
    [(StatxAttributes::IMMUTABLE, 0x10), (StatxAttributes::APPEND, 0x20), (StatxAttributes::NODUMP, 0x40)];

/// Device and inode number.
pub(crate) type Identity = (u64, u64);

/// Attributes from `statx(2)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    pub(crate) kind: FileType,
    /// Permission bits with set-id and sticky bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    /// Allocated bytes of the file.
    pub(crate) allocated: u64,
    pub(crate) links: u32,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) special: u64,
    pub(crate) accessed: (i64, u32),
    pub(crate) modified: (i64, u32),
    pub(crate) changed: (i64, u32),
    /// File flags, as in chattr(1), among those that are copied.
    pub(crate) flags: u32,
}

impl Meta {
    /// Reads the attributes of an entry of a directory, without following a link.
    pub(crate) fn of_entry(directory: BorrowedFd<'_>, name: &[u8]) -> io::Result<Meta> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        Ok(Meta::new(&fs::statx(directory, name, flags, StatxFlags::BASIC_STATS)?))
    }

    /// Reads the attributes of an open file.
    pub(crate) fn of_file(file: BorrowedFd<'_>) -> io::Result<Meta> {
        Ok(Meta::new(&fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?))
    }

    fn new(stat: &Statx) -> Meta {
        let mode = u32::from(stat.stx_mode);
        let set = stat.stx_attributes;
        Meta {
            kind: FileType::from_raw_mode(mode),
            mode: mode & 0o7777,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: stat.stx_size,
            allocated: stat.stx_blocks.saturating_mul(512),
            links: stat.stx_nlink,
            device: fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            special: fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
            accessed: (stat.stx_atime.tv_sec, stat.stx_atime.tv_nsec),
            modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
            flags: FLAGS
                .iter()
                .filter(|(attribute, _)| set.contains(*attribute))
                .fold(0, |flags, (_, flag)| flags | flag),
        }
    }

    /// Returns the identity of the file.
    pub(crate) fn identity(&self) -> Identity {
        (self.device, self.inode)
    }

    /// Whether the file was written between the two readings.
    pub(crate) fn was_changed_until(&self, later: &Meta) -> bool {
        (self.size, self.modified, self.changed) != (later.size, later.modified, later.changed)
    }

    /// Whether `copy` has the same modification time, in the resolution of its file system.
    pub(crate) fn same_time(&self, copy: &Meta) -> bool {
        let (seconds, nanoseconds) = self.modified;
        if copy.modified.0 == seconds {
            return [1, 100, 1000, 1_000_000, 1_000_000_000]
                .iter()
                .any(|unit| copy.modified.1 == nanoseconds / unit * unit);
        }
        // FAT has a resolution of two seconds.
        copy.modified == (seconds & !1, 0)
    }

    fn times(&self) -> Timestamps {
        let time = |(tv_sec, tv_nsec): (i64, u32)| Timespec { tv_sec, tv_nsec: tv_nsec.into() };
        Timestamps { last_access: time(self.accessed), last_modification: time(self.modified) }
    }
}

/// File or entry whose attributes are read and set.
#[derive(Clone, Copy)]
pub(crate) enum MetadataTarget<'a> {
    /// A file that is open for reading or writing.
    Open(BorrowedFd<'a>),
    /// A file open with `O_PATH`.
    Handle(BorrowedFd<'a>),
    /// An entry of a directory, without following a link.
    Entry(BorrowedFd<'a>, &'a [u8]),
}

impl<'a> MetadataTarget<'a> {
    fn target(self) -> Target<'a> {
        match self {
            MetadataTarget::Open(file) | MetadataTarget::Handle(file) => Target::File(file),
            MetadataTarget::Entry(directory, name) => Target::Entry(directory, name),
        }
    }

    fn list(self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            MetadataTarget::Open(file) => Ok(fs::flistxattr(file, buffer)?),
            other => xattrat::list(other.target(), buffer),
        }
    }

    fn get(self, name: &[u8], buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            MetadataTarget::Open(file) => Ok(fs::fgetxattr(file, name, buffer)?),
            other => xattrat::get(other.target(), name, buffer),
        }
    }

    fn set(self, name: &[u8], value: &[u8]) -> io::Result<()> {
        match self {
            MetadataTarget::Open(file) => Ok(fs::fsetxattr(file, name, value, fs::XattrFlags::empty())?),
            other => xattrat::set(other.target(), name, value, 0),
        }
    }

    /// Removes an attribute; a missing one is no error.
    pub(crate) fn remove(self, name: &[u8]) -> io::Result<()> {
        let done = match self {
            MetadataTarget::Open(file) => fs::fremovexattr(file, name).map_err(io::Error::from),
            other => xattrat::remove(other.target(), name),
        };
        match errno_of(&done) {
            Some(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            _ => done,
        }
    }

    /// Lists the names of all attributes, each terminated by a NUL; none where the file system has no attributes.
    fn names(self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        buffer.resize(ATTRIBUTE_MAX, 0);
        let listed = self.list(buffer);
        match errno_of(&listed) {
            Some(Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS) => Ok(0),
            _ => listed,
        }
    }
}

fn errno_of<T>(result: &io::Result<T>) -> Option<Errno> {
    result.as_ref().err().and_then(io::Error::raw_os_error).map(Errno::from_raw_os_error)
}

/// Buffers for attributes, one set per worker.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    names: Vec<u8>,
    value: Vec<u8>,
    other: Vec<u8>,
}

/// An entry of DEST whose metadata is set.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    /// A descriptor of the entry.
    pub(crate) file: BorrowedFd<'a>,
    /// Whether the descriptor is `O_PATH`.
    pub(crate) handle: bool,
    /// Whether it existed before this copy, and may have attributes that SOURCE has not.
    pub(crate) existing: bool,
    /// The attributes of the entry in SOURCE.
    pub(crate) from: MetadataTarget<'a>,
}

/// Sets all metadata of an entry except its file flags: owner first (the kernel then clears set-id bits and
/// capabilities), attributes, mode, and times last. Returns its identity, and whether anything but access times
/// differed.
pub(crate) fn give(
    job: &Job<'_>,
    rooms: &mut Rooms,
    wanted: &Meta,
    to: Given<'_>,
) -> Result<(Identity, bool), Trouble> {
    let now = Meta::of_file(to.file).destination("look at")?;
    let owned = give_owner(job, wanted, &now, to.file)?;
    let Attributes { changed, lists, group } = give_attributes(job, rooms, to)?;
    let mut changed = changed || owned && (now.uid, now.gid) != (wanted.uid, wanted.gid);
    if wanted.kind != FileType::Symlink {
        // Set-id bits would give the rights of another owner than intended.
        let mode = if owned { wanted.mode } else { wanted.mode & !0o6000 } & (group << 3 | 0o7707);
        let chowned = (now.uid, now.gid) != (wanted.uid, wanted.gid);
        changed |= now.mode != mode;
        if now.mode != mode || lists || (chowned && mode & 0o6000 != 0) {
            let set = if to.handle {
                inode::change_mode(to.file, mode)
            } else {
                fs::fchmod(to.file, Mode::from_raw_mode(mode)).map_err(io::Error::from)
            };
            set.destination("set the mode of")?;
        }
    }
    let times = wanted.times();
    let timed = if to.handle {
        fs::utimensat(to.file, c"", &times, AtFlags::EMPTY_PATH)
    } else {
        fs::futimens(to.file, &times)
    };
    timed.destination("set the times of")?;
    Ok((now.identity(), changed))
}

/// Sets the owner; returns whether the entry has the right one.
fn give_owner(job: &Job<'_>, wanted: &Meta, now: &Meta, file: BorrowedFd<'_>) -> Result<bool, Trouble> {
    if (now.uid, now.gid) == (wanted.uid, wanted.gid) {
        return Ok(true);
    }
    let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
    let chown = |uid| fs::chownat(file, c"", uid, Some(gid), AtFlags::EMPTY_PATH);
    match chown(Some(uid)) {
        Ok(()) => return Ok(true),
        // Only root can change the owner; EINVAL: the id is not mapped in this user namespace or file system.
        Err(Errno::PERM | Errno::INVAL | Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error).destination("set the owner of"),
    }
    // The group alone can be one of ours.
    let _ = chown(None);
    job.lost(&job.figures.lost_owners, "its owner cannot be given away by this user")?;
    Ok(false)
}

/// Result of setting attributes.
struct Attributes {
    /// Some attributes differed.
    changed: bool,
    /// An access control list was among these, which changes the mode.
    lists: bool,
    /// Mask of the group's permissions: with an ACL the group bits of the mode are its mask, and where the ACL is
    /// lost, they would grant the group what the ACL denies.
    group: u32,
}

/// Returns the permissions of the owning group in an access control list (`acl_ea_entry` in
/// include/uapi/linux/posix_acl_xattr.h, `ACL_GROUP_OBJ`); none if there is no such entry.
fn group_of_list(list: &[u8]) -> u32 {
    const VERSION: usize = 4;
    let entry = |entry: &[u8; 8]| {
        let [tag, _, permissions, ..] = *entry;
        (tag == 0x04).then_some(u32::from(permissions))
    };
    list.get(VERSION..).unwrap_or_default().as_chunks::<8>().0.iter().find_map(entry).unwrap_or(0)
}

/// Copies all attributes.
fn give_attributes(job: &Job<'_>, rooms: &mut Rooms, to: Given<'_>) -> Result<Attributes, Trouble> {
    let place = if to.handle { MetadataTarget::Handle(to.file) } else { MetadataTarget::Open(to.file) };
    let Rooms { names, value, other } = rooms;
    let length = to.from.names(names).source("list the attributes of")?;
    let names = names.get(..length).unwrap_or_default();
    let (mut changed, mut lists, mut group) = (false, false, 0o7);
    if to.existing {
        let length = place.names(other).destination("list the attributes of")?;
        for name in split(other.get(..length).unwrap_or_default()) {
            if name != SELINUX && !split(names).any(|wanted| wanted == name) {
                lists |= name == ACCESS_ACL;
                changed = true;
                place.remove(name).destination("remove an attribute of")?;
            }
        }
    }
    for name in split(names) {
        value.resize(ATTRIBUTE_MAX, 0);
        let got = to.from.get(name, value);
        let length = match errno_of(&got) {
            // It was removed meanwhile, or this user may not read it.
            Some(Errno::NODATA) => continue,
            Some(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP) => {
                job.lost(&job.figures.lost_attributes, "an attribute cannot be read by this user")?;
                continue;
            }
            _ => got.source("read an attribute of")?,
        };
        let wanted = value.get(..length).unwrap_or_default();
        if to.existing {
            other.resize(ATTRIBUTE_MAX, 0);
            if place.get(name, other).is_ok_and(|length| other.get(..length) == Some(wanted)) {
                continue;
            }
        }
        let set = place.set(name, wanted);
        match errno_of(&set) {
            None => {
                lists |= name == ACCESS_ACL;
                changed = true;
            }
            Some(Errno::OPNOTSUPP) if name == ACCESS_ACL || name == DEFAULT_ACL => {
                if name == ACCESS_ACL {
                    group = group_of_list(wanted);
                }
                job.lost(&job.figures.lost_lists, "the destination has no access control lists")?;
            }
            Some(Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS | Errno::RANGE | Errno::TOOBIG | Errno::INVAL) => {
                job.lost(
                    &job.figures.lost_attributes,
                    "an attribute cannot be held by the destination or set by this user",
                )?;
            }
            // A file system without space for attributes, but with space for data (ext4), answers ENOSPC, too.
            Some(Errno::NOSPC) if !job.is_full() => {
                job.lost(&job.figures.lost_attributes, "there is no room for an attribute at the destination")?;
            }
            Some(_) => set.destination("set an attribute of")?,
        }
    }
    Ok(Attributes { changed, lists, group })
}

/// Sets the file flags of an entry; last of all, because an immutable file cannot be changed.
pub(crate) fn give_flags(job: &Job<'_>, wanted: &Meta, file: BorrowedFd<'_>) -> Result<(), Trouble> {
    let all = FLAGS.iter().fold(0, |flags, (_, flag)| flags | flag);
    let given = ioctls::flags(file).and_then(|now| ioctls::set_flags(file, now & !all | wanted.flags));
    match errno_of(&given) {
        None => Ok(()),
        Some(Errno::PERM | Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
            job.lost(&job.figures.lost_attributes, "its flags (chattr) cannot be set")
        }
        Some(_) => given.destination("set the flags of"),
    }
}

/// Returns the first attribute that differs between an entry and its copy; `None` when all are equal.
pub(crate) fn attribute_that_differs(
    rooms: &mut Rooms,
    source: MetadataTarget<'_>,
    copy: MetadataTarget<'_>,
) -> Result<Option<String>, Trouble> {
    let Rooms { names, value, other } = rooms;
    let length = source.names(names).source("list the attributes of")?;
    for name in split(names.get(..length).unwrap_or_default()).filter(|name| *name != SELINUX) {
        value.resize(ATTRIBUTE_MAX, 0);
        other.resize(ATTRIBUTE_MAX, 0);
        let Ok(length) = source.get(name, value) else { continue };
        let same = copy.get(name, other).is_ok_and(|got| value.get(..length) == other.get(..got));
        if !same {
            return Ok(Some(String::from_utf8_lossy(name).into_owned()));
        }
    }
    Ok(None)
}

fn split(names: &[u8]) -> impl Iterator<Item = &[u8]> {
    names.split(|byte| *byte == 0).filter(|name| !name.is_empty() && !SHADOWS.contains(name))
}

impl Job<'_> {
    /// Counts metadata that DEST does not hold as SOURCE does.
    pub(crate) fn lost(&self, counter: &std::sync::atomic::AtomicU64, what: &str) -> Result<(), Trouble> {
        if self.options.strict {
            return Err(Trouble::Fact(crate::trouble::Side::Destination, format!("is not the same: {what}")));
        }
        add(counter, 1);
        Ok(())
    }
}
