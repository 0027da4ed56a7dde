//! Verification after the copy: every entry of SOURCE is compared with its counterpart, data byte by byte as read
//! from the device.

use crate::{
    content::BUFFER,
    figures::add,
    links::{Claim, Copied},
    metadata::{self, Meta, MetadataTarget},
    pair::Pair,
    trouble::{During, Side, Trouble},
    walk::Worker,
};
use rustix::{
    fs::{self, Advice, FileType, Mode, OFlags},
    io::{self, Errno},
};
use std::{
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::Arc,
};

impl Worker<'_> {
    /// Compares one entry that is no directory.
    pub(crate) fn compare_entry(&mut self, pair: &Arc<Pair>, name: &[u8]) -> Result<(), Trouble> {
        let source = Meta::of_entry(pair.source.as_fd(), name).source("look at")?;
        let copy = Meta::of_entry(pair.dest.as_fd(), name).destination("look at")?;
        self.compare_metadata(
            &source,
            &copy,
            MetadataTarget::Entry(pair.source.as_fd(), name),
            MetadataTarget::Entry(pair.dest.as_fd(), name),
        )?;
        if source.links > 1 && !self.compare_links(pair, name, &source, &copy)? {
            // Another name of a file that has been compared already.
            add(&self.job().figures.verified, 1);
            return Ok(());
        }
        match source.kind {
            FileType::RegularFile => self.compare_content(pair, name, &source)?,
            FileType::Symlink => {
                let wanted = fs::readlinkat(&pair.source, name, Vec::new()).source("read the link")?;
                let target = fs::readlinkat(&pair.dest, name, Vec::new()).destination("read the link")?;
                same(wanted == target, "leads somewhere else")?;
            }
            _ => same(source.special == copy.special, "is another device")?,
        }
        add(&self.job().figures.verified, 1);
        Ok(())
    }

    /// Compares a directory, after its entries.
    pub(crate) fn compare_directory(&mut self, pair: &Pair) -> Result<(), Trouble> {
        let source = Meta::of_file(pair.source.as_fd()).source("look at")?;
        let copy = Meta::of_file(pair.dest.as_fd()).destination("look at")?;
        self.compare_metadata(
            &source,
            &copy,
            MetadataTarget::Open(pair.source.as_fd()),
            MetadataTarget::Open(pair.dest.as_fd()),
        )?;
        add(&self.job().figures.verified, 1);
        Ok(())
    }

    /// Compares metadata, without what the copy has counted as lost.
    fn compare_metadata(
        &mut self,
        source: &Meta,
        copy: &Meta,
        from: MetadataTarget<'_>,
        to: MetadataTarget<'_>,
    ) -> Result<(), Trouble> {
        let job = self.job();
        same(source.kind == copy.kind, "is of another type")?;
        let owner = (source.uid, source.gid) == (copy.uid, copy.gid);
        same(owner || job.may_lack_owners(), "has another owner")?;
        // Set-id bits are not set with another owner.
        let bits = if owner { 0o7777 } else { 0o1777 };
        // Group permissions that only the mask of a lost ACL allows are not set either.
        let narrowed = if job.may_lack_lists() { source.mode & !copy.mode & 0o070 } else { 0 };
        let bits = bits & !narrowed;
        same(source.kind == FileType::Symlink || source.mode & bits == copy.mode & bits, "has another mode")?;
        same(source.same_time(copy), "has another time")?;
        if job.may_lack_attributes() {
            return Ok(());
        }
        match metadata::attribute_that_differs(&mut self.rooms, from, to)? {
            Some(name) => Err(Trouble::Fact(Side::Destination, format!("is not the same: attribute {name} differs"))),
            None => Ok(()),
        }
    }

    /// Whether the data of a file with several hard links is still to be compared; its names have to be one file in
    /// DEST, too.
    fn compare_links(&self, pair: &Arc<Pair>, name: &[u8], source: &Meta, copy: &Meta) -> Result<bool, Trouble> {
        if self.job().may_lack_links() {
            return Ok(true);
        }
        match self.walk.links.claim(source.identity(), source.links, pair, name) {
            Claim::First => {
                // Other names need only the identity, not the data.
                let copied = Copied { path: PathBuf::new(), identity: copy.identity() };
                let _ = self.walk.links.copied(source.identity(), &copied);
                Ok(true)
            }
            Claim::Copied(copied) => {
                same(copied.identity == copy.identity(), "is a file of its own instead of another name").map(|()| false)
            }
            Claim::Waits => Ok(true),
        }
    }

    fn compare_content(&mut self, pair: &Pair, name: &[u8], meta: &Meta) -> Result<(), Trouble> {
        let source = self.open_source(pair, name)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let copy = match fs::openat(&pair.dest, name, flags | OFlags::NOATIME, Mode::empty()) {
            Err(Errno::PERM) => fs::openat(&pair.dest, name, flags, Mode::empty()),
            opened => opened,
        }
        .destination("open")?;
        // The page cache does not show what is on the device. This is advice: where it is ignored, the page cache
        // is compared.
        let _ = fs::fadvise(&copy, 0, None, Advice::DontNeed);
        let mut at = 0;
        loop {
            self.job().go_on()?;
            let length = fill(source.as_fd(), &mut self.buffer, at).source("read")?;
            let other = fill(copy.as_fd(), &mut self.second, at).destination("read")?;
            let equal = self.buffer.get(..length) == self.second.get(..other);
            if !equal {
                let now = Meta::of_file(source.as_fd()).source("look at")?;
                if meta.was_changed_until(&now) {
                    return Err(Trouble::Fact(Side::Source, "was written to after it was copied".to_owned()));
                }
                let apart = self
                    .buffer
                    .iter()
                    .zip(&self.second)
                    .take(length.min(other))
                    .take_while(|(one, other)| one == other)
                    .count();
                return Err(Trouble::Fact(
                    Side::Destination,
                    format!("differs from its source at byte {}", at + apart as u64),
                ));
            }
            at += length as u64;
            add(&self.job().figures.verified_bytes, length as u64);
            if length < BUFFER {
                return Ok(());
            }
        }
    }
}

/// Fills the buffer from `at` on; reads less only at the end of the file.
fn fill(file: BorrowedFd<'_>, buffer: &mut [u8], at: u64) -> Result<usize, Errno> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match io::pread(file, rest, at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn same(is: bool, otherwise: &str) -> Result<(), Trouble> {
    if is { Ok(()) } else { Err(Trouble::Fact(Side::Destination, otherwise.to_owned())) }
}
