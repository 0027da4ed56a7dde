//! Replies, built directly in the transport's buffer.
//!
//! A handler calls one of the methods per request and returns its result. A second call replaces the first. Nothing
//! is allocated and nothing is sent before the handler returns. Invariant: `len <= body.len()`; the body never
//! includes the reply's header.

use crate::abi::{
    AttrOut, BmapOut, CopyFileRangeOut, Dirent, EntryOut, FileLock, GetxattrOut, IoctlOut, Kstatfs, LkOut, LseekOut,
    OpenOut, Pod, PollOut, StatxOut, WriteOut,
};
use crate::errno::Errno;

/// The reply to one request. A handler that returns `Ok` without building anything sends an empty reply of success.
#[derive(Debug)]
pub struct Reply<'a> {
    body: &'a mut [u8],
    len: usize,
}

impl<'a> Reply<'a> {
    /// A reply in a transport's buffer; tests of handlers may use any buffer.
    pub fn new(body: &'a mut [u8]) -> Reply<'a> {
        Reply { body, len: 0 }
    }

    /// Maximum data of this reply, bytes. At least the `size` of any READ, READDIR or GETXATTR.
    pub fn capacity(&self) -> usize {
        self.body.len()
    }

    /// The bytes built so far.
    pub fn built(&self) -> &[u8] {
        self.body.get(..self.len).unwrap_or_default()
    }

    /// Number of bytes built so far.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Builds a reply with a node, to LOOKUP, MKNOD, MKDIR, SYMLINK and LINK.
    pub fn entry(&mut self, entry: &EntryOut) -> Result<(), Errno> {
        self.plain(entry)
    }

    /// Builds a negative reply to LOOKUP, which may be cached for this time.
    pub fn no_entry(&mut self, valid: u64, valid_nsec: u32) -> Result<(), Errno> {
        self.plain(&EntryOut { entry_valid: valid, entry_valid_nsec: valid_nsec, ..EntryOut::default() })
    }

    /// Builds a reply with attributes, to GETATTR and SETATTR.
    pub fn attr(&mut self, attr: &AttrOut) -> Result<(), Errno> {
        self.plain(attr)
    }

    /// Builds a reply with attributes, to STATX.
    pub fn statx(&mut self, statx: &StatxOut) -> Result<(), Errno> {
        self.plain(statx)
    }

    /// Builds a reply with a handle, to OPEN and OPENDIR.
    pub fn open(&mut self, open: &OpenOut) -> Result<(), Errno> {
        self.plain(open)
    }

    /// Builds a reply with a node and a handle, to CREATE and TMPFILE.
    pub fn created(&mut self, entry: &EntryOut, open: &OpenOut) -> Result<(), Errno> {
        self.plain(entry)?;
        self.append(open.bytes())
    }

    /// Builds a reply with the bytes written, to WRITE.
    pub fn written(&mut self, size: u32) -> Result<(), Errno> {
        self.plain(&WriteOut { size, padding: 0 })
    }

    /// Builds a reply with the bytes copied, to COPY_FILE_RANGE, in the form of the request.
    pub fn copied(&mut self, size: u64, wide: bool) -> Result<(), Errno> {
        if wide {
            self.plain(&CopyFileRangeOut { bytes_copied: size })
        } else {
            self.written(u32::try_from(size).map_err(|_| Errno::EINVAL)?)
        }
    }

    /// Builds a reply with statistics, to STATFS.
    pub fn statfs(&mut self, figures: &Kstatfs) -> Result<(), Errno> {
        self.plain(figures)
    }

    /// Builds a reply with the size of an attribute or list, to GETXATTR and LISTXATTR of size 0.
    pub fn xattr_size(&mut self, size: u32) -> Result<(), Errno> {
        self.plain(&GetxattrOut { size, padding: 0 })
    }

    /// Builds a reply with the conflicting lock (`F_UNLCK`: none), to GETLK.
    pub fn lock(&mut self, lock: &FileLock) -> Result<(), Errno> {
        self.plain(&LkOut { lk: *lock })
    }

    /// Builds a reply with a position, to LSEEK.
    pub fn lseek(&mut self, offset: u64) -> Result<(), Errno> {
        self.plain(&LseekOut { offset })
    }

    /// Builds a reply with result and data, to IOCTL. At most the request's `out_size` bytes.
    pub fn ioctl(&mut self, result: i32, data: &[u8]) -> Result<(), Errno> {
        self.plain(&IoctlOut { result, ..IoctlOut::default() })?;
        self.append(data)
    }

    /// Builds a reply with ready events, to POLL.
    pub fn poll(&mut self, revents: u32) -> Result<(), Errno> {
        self.plain(&PollOut { revents, padding: 0 })
    }

    /// Builds a reply with a block number, to BMAP.
    pub fn bmap(&mut self, block: u64) -> Result<(), Errno> {
        self.plain(&BmapOut { block })
    }

    /// Builds a reply with data, to READ, READLINK, GETXATTR and LISTXATTR. ERANGE if it exceeds [`Reply::capacity`].
    pub fn bytes(&mut self, data: &[u8]) -> Result<(), Errno> {
        self.len = 0;
        self.append(data)
    }

    /// Returns the buffer for up to `max` bytes of data without a copy (less if the buffer is smaller); then call
    /// [`Reply::filled`]. It contains data of earlier requests.
    pub fn buffer(&mut self, max: usize) -> &mut [u8] {
        self.len = 0;
        let max = max.min(self.body.len());
        self.body.get_mut(..max).unwrap_or_default()
    }

    /// Builds a reply of the first `size` bytes of the buffer.
    pub fn filled(&mut self, size: usize) -> Result<(), Errno> {
        if size > self.body.len() {
            return Err(Errno::EIO);
        }
        self.len = size;
        Ok(())
    }

    /// Builds a listing of at most `size` bytes, the reply to READDIR and READDIRPLUS. Added entries are in the reply
    /// at once.
    pub fn directory(&mut self, size: u32) -> Directory<'_, 'a> {
        self.len = 0;
        let limit = self.body.len().min(size as usize);
        Directory { reply: self, limit }
    }

    fn plain<T: Pod>(&mut self, value: &T) -> Result<(), Errno> {
        self.len = 0;
        self.append(value.bytes())
    }

    fn append(&mut self, data: &[u8]) -> Result<(), Errno> {
        let end = self.len.checked_add(data.len()).ok_or(Errno::ERANGE)?;
        self.body.get_mut(self.len..end).ok_or(Errno::ERANGE)?.copy_from_slice(data);
        self.len = end;
        Ok(())
    }
}

/// A listing being built.
#[derive(Debug)]
pub struct Directory<'r, 'a> {
    reply: &'r mut Reply<'a>,
    limit: usize,
}

impl Directory<'_, '_> {
    /// Adds an entry for READDIR. `off` is the offset of the next request that continues after this entry; `d_type` a
    /// `DT_*`. Returns false, and adds nothing, if there is no space: then the listing has to be sent.
    #[must_use]
    pub fn add(&mut self, ino: u64, off: u64, d_type: u8, name: &[u8]) -> bool {
        self.put(None, ino, off, d_type, name)
    }

    /// Adds an entry for READDIRPLUS. `entry.nodeid` 0 means "not looked up": no attributes, no lookup counted.
    #[must_use]
    pub fn add_plus(&mut self, entry: &EntryOut, ino: u64, off: u64, d_type: u8, name: &[u8]) -> bool {
        self.put(Some(entry), ino, off, d_type, name)
    }

    /// Whether an entry with a name of this length would still fit; `plus` for
    /// [`Directory::add_plus`].
    pub fn fits(&self, name_len: usize, plus: bool) -> bool {
        let head = if plus { size_of::<EntryOut>() } else { 0 } + size_of::<Dirent>();
        self.reply.len + (head + name_len).next_multiple_of(8) <= self.limit
    }

    /// Approximate number of entries with names of 24 bytes that would still fit.
    pub fn room(&self, plus: bool) -> usize {
        let head = if plus { size_of::<EntryOut>() } else { 0 } + size_of::<Dirent>();
        self.limit.saturating_sub(self.reply.len) / (head + 24)
    }

    /// Bytes used so far; 0 means that nothing was added (the end of the directory, for the
    /// kernel).
    pub fn used(&self) -> usize {
        self.reply.len
    }

    fn put(&mut self, entry: Option<&EntryOut>, ino: u64, off: u64, d_type: u8, name: &[u8]) -> bool {
        let Ok(namelen) = u32::try_from(name.len()) else { return false };
        if !self.fits(name.len(), entry.is_some()) {
            return false;
        }
        let head = Dirent { ino, off, namelen, r#type: u32::from(d_type) };
        let before = entry.map_or(0, |_| size_of::<EntryOut>());
        let end = self.reply.len + (before + size_of::<Dirent>() + name.len()).next_multiple_of(8);
        let placed = self.reply.body.get_mut(self.reply.len..end).and_then(|place| {
            let (first, rest) = place.split_at_mut_checked(before)?;
            let (second, rest) = rest.split_first_chunk_mut::<{ size_of::<Dirent>() }>()?;
            // The padding after the name is zero.
            if let Some(last) = rest.last_chunk_mut::<8>() {
                *last = [0; 8];
            }
            first.copy_from_slice(entry.map(Pod::bytes).unwrap_or_default());
            second.copy_from_slice(head.bytes());
            rest.get_mut(..name.len())?.copy_from_slice(name);
            Some(())
        });
        if placed.is_some() {
            self.reply.len = end;
        }
        placed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answer_counts() {
        let mut body = [0xff_u8; 256];
        let mut reply = Reply::new(&mut body);
        reply.bytes(b"something long enough").unwrap();
        reply.written(7).unwrap();
        assert_eq!(reply.built(), WriteOut { size: 7, padding: 0 }.bytes());
        reply
            .created(&EntryOut { nodeid: 9, ..EntryOut::default() }, &OpenOut { fh: 3, ..OpenOut::default() })
            .unwrap();
        assert_eq!(reply.built().len(), 144);
        assert_eq!(OpenOut::read(&reply.built()[128..]).unwrap().fh, 3);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut body = [0_u8; 100];
        let mut reply = Reply::new(&mut body);
        assert_eq!(reply.bytes(&[1; 101]), Err(Errno::ERANGE));
        assert_eq!(reply.attr(&AttrOut::default()), Err(Errno::ERANGE));
        assert_eq!(reply.buffer(usize::MAX).len(), 100);
        assert_eq!(reply.filled(101), Err(Errno::EIO));
        assert_eq!(reply.copied(1 << 32, false), Err(Errno::EINVAL));
        assert_eq!(reply.copied(1 << 32, true), Ok(()));
    }

    #[test]
    fn entries_are_padded_and_stop_at_the_size() {
        let mut body = [0xff_u8; 4096];
        let mut reply = Reply::new(&mut body);
        let mut list = reply.directory(24 + 8 + 128 + 24 + 16);
        assert!(list.add(5, 1, 8, b"abc"));
        assert_eq!(list.used(), 32);
        assert!(!list.fits(17, true) && list.fits(16, true));
        assert!(!list.add_plus(&EntryOut::default(), 6, 2, 8, b"seventeen letters"));
        assert_eq!(list.used(), 32);
        assert!(list.add_plus(&EntryOut::default(), 6, 2, 8, b"sixteen letters!"));
        assert!(!list.add(7, 3, 8, b"x"));
        let built = reply.built();
        assert_eq!(Dirent::read(built), Some(Dirent { ino: 5, off: 1, namelen: 3, r#type: 8 }));
        assert_eq!(built[24..32], *b"abc\0\0\0\0\0");
        assert_eq!(Dirent::read(&built[32 + 128..]).unwrap().ino, 6);
        assert_eq!(built.len(), 200);
    }
}
