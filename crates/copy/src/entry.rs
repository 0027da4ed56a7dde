//! Copy of one entry that is no directory: made under a temporary name, given its data and metadata, and renamed.

use crate::{
    figures::add,
    links::{Claim, Copied, Further},
    metadata::{self, Given, Identity, Meta, MetadataTarget},
    pair::{Pair, path_of},
    trouble::{During, Side, Trouble},
    walk::Worker,
};
use nacre_sys::inode;
use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags},
    io::Errno,
};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// How often a file is copied that is written to meanwhile.
const ATTEMPTS: usize = 3;
/// Opens a file of any type without reading it (`O_PATH`).
const HANDLE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Result for one entry.
struct Done {
    identity: Identity,
    present: bool,
}

impl Worker<'_> {
    /// Copies one entry; `regular`: the directory lists it as a regular file.
    pub(crate) fn copy_entry(&mut self, pair: &Arc<Pair>, name: &[u8], regular: bool) -> Result<(), Trouble> {
        let mut file = None;
        let mut meta = if regular && pair.fresh {
            // No entry can exist already: opening first saves a stat.
            let opened = self.open_source(pair, name)?;
            let meta = Meta::of_file(opened.as_fd()).source("look at")?;
            file = Some(opened);
            meta
        } else {
            Meta::of_entry(pair.source.as_fd(), name).source("look at")?
        };
        if file.is_some() && meta.kind != FileType::RegularFile {
            file = None;
            meta = Meta::of_entry(pair.source.as_fd(), name).source("look at")?;
        }
        if meta.kind == FileType::Directory {
            return Err(Trouble::Fact(Side::Source, "has become a directory while it was copied".to_owned()));
        }
        if meta.links > 1 {
            return self.copy_linked(pair, name, file, &meta);
        }
        let done = self.copy_one(pair, name, file, &meta)?;
        self.count(&meta, done.present);
        Ok(())
    }

    fn count(&self, meta: &Meta, present: bool) {
        let figures = self.job().figures;
        add(&figures.entries, 1);
        if present {
            add(&figures.present, 1);
            if meta.kind == FileType::RegularFile {
                add(&figures.present_bytes, meta.size.min(meta.allocated));
            }
        }
    }

    /// Copies a file with several hard links: the first name is copied, the others become links to the copy.
    fn copy_linked(
        &mut self,
        pair: &Arc<Pair>,
        name: &[u8],
        file: Option<OwnedFd>,
        meta: &Meta,
    ) -> Result<(), Trouble> {
        let of = meta.identity();
        match self.walk.links.claim(of, meta.links, pair, name) {
            Claim::Waits => return Ok(()),
            Claim::Copied(copied) => return self.link_or_copy(pair, name, meta, &copied),
            Claim::First => {}
        }
        let mut first = self.copy_one(pair, name, file, meta);
        let mut at = path_of(pair, name);
        loop {
            match first {
                Ok(done) => {
                    self.count(meta, done.present);
                    let copied = Copied { path: at, identity: done.identity };
                    for further in self.walk.links.copied(of, &copied) {
                        let result = self.link_or_copy(&further.pair, &further.name, meta, &copied);
                        self.account(&further.pair, &further.name, result);
                        self.release(further.pair);
                    }
                    return Ok(());
                }
                Err(trouble) => {
                    let Some(Further { pair: other, name: next }) = self.walk.links.failed(of) else {
                        return Err(trouble);
                    };
                    // Each failed name is reported; the last one by the caller.
                    self.job().failed(&trouble, &at);
                    at = path_of(&other, &next);
                    first = self.copy_one(&other, &next, None, meta);
                    self.release(other);
                }
            }
        }
    }

    /// Links a further name to a copy; if that is impossible, the name gets a copy of its own.
    fn link_or_copy(&mut self, pair: &Arc<Pair>, name: &[u8], meta: &Meta, copied: &Copied) -> Result<(), Trouble> {
        if !pair.fresh && Meta::of_entry(pair.dest.as_fd(), name).is_ok_and(|there| there.identity() == copied.identity)
        {
            add(&self.job().figures.links, 1);
            self.count(meta, true);
            return Ok(());
        }
        let linked = self.find(copied).and_then(|file| self.link(file.as_fd(), pair, name));
        match linked {
            Ok(()) => {
                add(&self.job().figures.links, 1);
                self.count(meta, false);
                Ok(())
            }
            Err(
                Errno::PERM
                | Errno::OPNOTSUPP
                | Errno::NOSYS
                | Errno::XDEV
                | Errno::ACCESS
                | Errno::NAMETOOLONG
                | Errno::NOENT,
            ) => {
                self.job().lost(&self.job().figures.lost_links, "hard links cannot be made here")?;
                self.copy_anew(pair, name, meta).map(drop)
            }
            Err(Errno::MLINK) => {
                let identity = self.copy_anew(pair, name, meta)?;
                self.walk.links.replace(meta.identity(), &Copied { path: path_of(pair, name), identity });
                Ok(())
            }
            Err(error) => Err(error).destination("make a hard link at"),
        }
    }

    fn copy_anew(&mut self, pair: &Arc<Pair>, name: &[u8], meta: &Meta) -> Result<Identity, Trouble> {
        let done = self.copy_one(pair, name, None, meta)?;
        self.count(meta, done.present);
        Ok(done.identity)
    }

    /// Opens the copy, if it is still where it was made.
    fn find(&self, copied: &Copied) -> Result<OwnedFd, Errno> {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = fs::openat2(&self.job().dest, copied.path.as_path(), HANDLE, Mode::empty(), beneath)?;
        let there = Meta::of_file(file.as_fd()).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        if there.identity() == copied.identity { Ok(file) } else { Err(Errno::NOENT) }
    }

    fn link(&self, file: BorrowedFd<'_>, pair: &Pair, name: &[u8]) -> Result<(), Errno> {
        let to = |name: &[u8]| match fs::linkat(file, c"", &pair.dest, name, AtFlags::EMPTY_PATH) {
            // Linking by descriptor needs CAP_DAC_READ_SEARCH; through `/proc` everybody can.
            Err(Errno::NOENT | Errno::PERM) => {
                fs::linkat(fs::CWD, inode::proc_path(file), &pair.dest, name, AtFlags::SYMLINK_FOLLOW)
            }
            done => done,
        };
        match to(name) {
            // Another file has the name; it is replaced atomically, like all entries.
            Err(Errno::EXIST) if !pair.fresh => {
                let temporary = self.temporary();
                let _ = fs::unlinkat(&pair.dest, temporary.as_str(), AtFlags::empty());
                to(temporary.as_bytes())?;
                fs::renameat(&pair.dest, temporary.as_str(), &pair.dest, name)
                    .inspect_err(|_| self.drop_temporary(pair))?;
                add(&self.job().figures.replaced, 1);
                Ok(())
            }
            done => done,
        }
    }

    /// Copies a file under one name; an identical file in DEST stays.
    fn copy_one(&mut self, pair: &Arc<Pair>, name: &[u8], file: Option<OwnedFd>, meta: &Meta) -> Result<Done, Trouble> {
        let mut replace = false;
        if !pair.fresh {
            match Meta::of_entry(pair.dest.as_fd(), name) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).destination("look at"),
                Ok(there) if there.identity() == meta.identity() => {
                    return Err(Trouble::Fact(Side::Source, "is in SOURCE and in DEST at once".to_owned()));
                }
                Ok(there) if there.kind == FileType::Directory => {
                    return Err(Trouble::Fact(
                        Side::Destination,
                        "is a directory: it is not replaced by a file".to_owned(),
                    ));
                }
                Ok(there) if self.is_same(pair, name, meta, &there)? => {
                    if self.job().options.update && self.renew_metadata(pair, name, meta, &there)? {
                        add(&self.job().figures.renewed, 1);
                    }
                    return Ok(Done { identity: there.identity(), present: true });
                }
                Ok(_) => replace = true,
            }
        }
        let identity = match meta.kind {
            FileType::RegularFile => self.make_regular(pair, name, file.map(|file| (file, *meta)), replace)?,
            _ => self.make_other(pair, name, replace)?,
        };
        add(&self.job().figures.replaced, u64::from(replace));
        Ok(Done { identity, present: false })
    }

    /// Whether the entry with this name is already the copy.
    fn is_same(&self, pair: &Pair, name: &[u8], meta: &Meta, there: &Meta) -> Result<bool, Trouble> {
        if meta.kind != there.kind || !meta.same_time(there) || !self.job().is_trusted(there) {
            return Ok(false);
        }
        Ok(match meta.kind {
            FileType::RegularFile => meta.size == there.size,
            FileType::Symlink => {
                let wanted = fs::readlinkat(&pair.source, name, Vec::new()).source("read the link")?;
                fs::readlinkat(&pair.dest, name, Vec::new()).is_ok_and(|target| target == wanted)
            }
            _ => meta.special == there.special,
        })
    }

    /// Updates the metadata of a file that stays; returns whether any differed.
    fn renew_metadata(&mut self, pair: &Pair, name: &[u8], meta: &Meta, there: &Meta) -> Result<bool, Trouble> {
        let handle = fs::openat(&pair.dest, name, HANDLE, Mode::empty()).destination("open")?;
        if Meta::of_file(handle.as_fd()).destination("look at")?.identity() != there.identity() {
            return Err(Trouble::Fact(Side::Destination, "was replaced by somebody else meanwhile".to_owned()));
        }
        let from = MetadataTarget::Entry(pair.source.as_fd(), name);
        let given = Given { file: handle.as_fd(), handle: true, existing: true, from };
        let (_, changed) = metadata::give(self.job(), &mut self.rooms, meta, given)?;
        self.renew_flags(pair, name, meta, there.identity())?;
        Ok(changed || meta.flags & !there.flags != 0)
    }

    /// Opens a regular file of SOURCE, without updating its access time where that is allowed.
    pub(crate) fn open_source(&self, pair: &Pair, name: &[u8]) -> Result<OwnedFd, Trouble> {
        // If it has become a pipe, the open does not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        match fs::openat(&pair.source, name, flags | OFlags::NOATIME, Mode::empty()) {
            Err(Errno::PERM) => fs::openat(&pair.source, name, flags, Mode::empty()),
            opened => opened,
        }
        .source("open")
    }

    /// Copies a regular file. `opened`: its descriptor and metadata, if it is open already.
    fn make_regular(
        &mut self,
        pair: &Pair,
        name: &[u8],
        opened: Option<(OwnedFd, Meta)>,
        replace: bool,
    ) -> Result<Identity, Trouble> {
        let (source, meta) = match opened {
            Some(opened) => opened,
            None => {
                let source = self.open_source(pair, name)?;
                let meta = Meta::of_file(source.as_fd()).source("look at")?;
                (source, meta)
            }
        };
        if meta.kind != FileType::RegularFile {
            return Err(Trouble::Fact(Side::Source, "has become something else while it was copied".to_owned()));
        }
        // Until it has its final owner, nobody else can read it; its maker can always write to it.
        let own = (meta.uid, meta.gid) == self.job().own;
        let mode = Mode::from_raw_mode(if own { meta.mode & 0o777 | 0o600 } else { 0o600 });
        let copy = self.create(pair, mode)?;
        let made = self.fill(pair, source.as_fd(), copy, meta).and_then(|(identity, meta, settled)| {
            self.put(pair, name, replace)?;
            if meta.flags != 0 {
                self.renew_flags(pair, name, &meta, identity)?;
            }
            Ok((identity, settled))
        });
        match made {
            Ok((identity, true)) => Ok(identity),
            Ok((_, false)) => Err(Trouble::Fact(
                Side::Source,
                format!(
                    "was written to while it was copied, {ATTEMPTS} times: the copy may hold parts of different states"
                ),
            )),
            Err(trouble) => {
                self.drop_temporary(pair);
                Err(trouble)
            }
        }
    }

    /// Copies data and metadata to a new file; returns its identity, the metadata of SOURCE at the last attempt,
    /// and whether the file was unchanged meanwhile.
    fn fill(
        &mut self,
        pair: &Pair,
        source: BorrowedFd<'_>,
        copy: OwnedFd,
        mut meta: Meta,
    ) -> Result<(Identity, Meta, bool), Trouble> {
        let mut settled = false;
        for attempt in 1..=ATTEMPTS {
            self.content(source, copy.as_fd(), &meta, pair.device)?;
            let later = Meta::of_file(source).source("look at")?;
            settled = !meta.was_changed_until(&later);
            if settled || attempt == ATTEMPTS {
                break;
            }
            fs::ftruncate(&copy, 0).destination("set the length of")?;
            meta = later;
        }
        let given = Given { file: copy.as_fd(), handle: false, existing: false, from: MetadataTarget::Open(source) };
        let (identity, _) = metadata::give(self.job(), &mut self.rooms, &meta, given)?;
        // Some file systems report failed writes only at close(2).
        inode::close(copy).destination("write")?;
        Ok((identity, meta, settled))
    }

    fn create(&self, pair: &Pair, mode: Mode) -> Result<OwnedFd, Trouble> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let temporary = self.temporary();
        let open = || fs::openat(&pair.dest, temporary.as_str(), flags, mode);
        match open() {
            // Left behind by a copy that was killed.
            Err(Errno::EXIST) => {
                fs::unlinkat(&pair.dest, temporary.as_str(), AtFlags::empty())
                    .destination("remove what an earlier copy left in")?;
                open()
            }
            opened => opened,
        }
        .destination("create")
    }

    /// Copies a symbolic link, pipe, socket or device.
    fn make_other(&mut self, pair: &Pair, name: &[u8], replace: bool) -> Result<Identity, Trouble> {
        let source = fs::openat(&pair.source, name, HANDLE, Mode::empty()).source("open")?;
        let meta = Meta::of_file(source.as_fd()).source("look at")?;
        let temporary = self.temporary();
        let make = || match meta.kind {
            FileType::Symlink => {
                let target = fs::readlinkat(&source, c"", Vec::new()).source("read the link")?;
                fs::symlinkat(target, &pair.dest, temporary.as_str()).destination("create the link")
            }
            FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice => {
                fs::mknodat(&pair.dest, temporary.as_str(), meta.kind, Mode::from_raw_mode(0o600), meta.special)
                    .destination("create")
            }
            _ => Err(Trouble::Fact(Side::Source, "has become something else while it was copied".to_owned())),
        };
        let _ = fs::unlinkat(&pair.dest, temporary.as_str(), AtFlags::empty());
        make()?;
        let dressed = self.dress(pair, source.as_fd(), &meta).and_then(|identity| {
            self.put(pair, name, replace)?;
            Ok(identity)
        });
        dressed.inspect_err(|_| self.drop_temporary(pair))
    }

    /// Sets the metadata of a new entry under the temporary name.
    fn dress(&mut self, pair: &Pair, source: BorrowedFd<'_>, meta: &Meta) -> Result<Identity, Trouble> {
        let handle = fs::openat(&pair.dest, self.temporary().as_str(), HANDLE, Mode::empty()).destination("open")?;
        let made = Meta::of_file(handle.as_fd()).destination("look at")?;
        // A user who can write to the directory could have put a link to another file there, to become its owner.
        if made.kind != meta.kind || made.links > 1 {
            return Err(Trouble::Fact(Side::Destination, "was replaced by somebody else meanwhile".to_owned()));
        }
        let given = Given { file: handle.as_fd(), handle: true, existing: false, from: MetadataTarget::Handle(source) };
        metadata::give(self.job(), &mut self.rooms, meta, given)?;
        Ok(made.identity())
    }

    /// Sets the file flags of an entry, if it is still this file.
    fn renew_flags(&self, pair: &Pair, name: &[u8], meta: &Meta, identity: Identity) -> Result<(), Trouble> {
        if meta.flags == 0 || meta.kind != FileType::RegularFile {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = fs::openat(&pair.dest, name, flags, Mode::empty()).destination("open")?;
        if Meta::of_file(file.as_fd()).destination("look at")?.identity() != identity {
            return Err(Trouble::Fact(Side::Destination, "was replaced by somebody else meanwhile".to_owned()));
        }
        metadata::give_flags(self.job(), meta, file.as_fd())
    }

    /// Renames the new entry to its name.
    fn put(&self, pair: &Pair, name: &[u8], replace: bool) -> Result<(), Trouble> {
        let temporary = self.temporary();
        let plain = || fs::renameat(&pair.dest, temporary.as_str(), &pair.dest, name);
        let renamed = if replace {
            plain()
        } else {
            // NOREPLACE: a file that was made by others meanwhile, or that differs only by case on a
            // case-insensitive file system, is not lost.
            match fs::renameat_with(&pair.dest, temporary.as_str(), &pair.dest, name, RenameFlags::NOREPLACE) {
                Err(Errno::INVAL | Errno::NOSYS) => plain(),
                renamed => renamed,
            }
        };
        renamed.destination("create")
    }

    /// Returns the temporary name of this worker.
    fn temporary(&self) -> String {
        self.job().temporary(self.number)
    }

    /// Best effort: a remaining file is removed when the copy is continued.
    fn drop_temporary(&self, pair: &Pair) {
        let _ = fs::unlinkat(&pair.dest, self.temporary().as_str(), AtFlags::empty());
    }
}
