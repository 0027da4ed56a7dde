//! The value of the attribute: `UID:GID:MODE[:TYPE]`. Pure.

use nacre_vfs::{Attr, Kind, SetAttr};
use std::fmt;

/// Attributes that a file shall show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StatRecord {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Permission bits with set-id and sticky.
    pub(super) mode: u32,
    /// Type and device; `None` for the file's real type.
    kind: Option<(Kind, (u32, u32))>,
}

impl StatRecord {
    pub(super) fn new(uid: u32, gid: u32, mode: u32, kind: Kind, device: (u32, u32)) -> StatRecord {
        StatRecord { uid, gid, mode, kind: Some((kind, device)) }
    }

    /// The record that equals a file's own attributes.
    pub(super) fn of(attr: &Attr) -> StatRecord {
        StatRecord::new(attr.uid, attr.gid, attr.mode, attr.kind, (attr.rdev_major, attr.rdev_minor))
    }

    /// Parses a value; `None` for a malformed one.
    pub(super) fn parse(value: &[u8]) -> Option<StatRecord> {
        let text = std::str::from_utf8(value).ok()?;
        let mut parts = text.trim_end_matches('\0').splitn(4, ':');
        let (uid, gid) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        // Old values contain the type in the mode as well.
        let mode = u32::from_str_radix(parts.next()?, 8).ok()? & 0o7777;
        let kind = match parts.next() {
            None => None,
            Some(text) => Some(parse_kind(text)?),
        };
        Some(StatRecord { uid, gid, mode, kind })
    }

    /// Overrides attributes with the record. Only a regular file can stand for another type.
    pub(super) fn apply(&self, attr: &mut Attr) {
        (attr.uid, attr.gid, attr.mode) = (self.uid, self.gid, self.mode);
        if let Some((kind, device)) = self.kind
            && attr.kind == Kind::File
            && !matches!(kind, Kind::File | Kind::Directory | Kind::Symlink)
        {
            attr.kind = kind;
            (attr.rdev_major, attr.rdev_minor) = device;
        }
    }

    /// The record after a change, with set-id bits cleared like by the native call.
    pub(super) fn changed(&self, change: &SetAttr) -> StatRecord {
        let mut after = *self;
        after.uid = change.uid.unwrap_or(after.uid);
        after.gid = change.gid.unwrap_or(after.gid);
        match change.mode {
            Some(mode) => after.mode = mode & 0o7777,
            None if change.kill_privileges && !matches!(self.kind, Some((Kind::Directory, _))) => {
                after.mode &= !0o4000;
                if after.mode & 0o010 != 0 || change.outside_group {
                    after.mode &= !0o2000;
                }
            }
            None => {}
        }
        after
    }
}

fn parse_kind(text: &str) -> Option<(Kind, (u32, u32))> {
    let plain = |kind| Some((kind, (0, 0)));
    match text {
        "file" => plain(Kind::File),
        "dir" => plain(Kind::Directory),
        "symlink" => plain(Kind::Symlink),
        "pipe" => plain(Kind::Fifo),
        "socket" => plain(Kind::Socket),
        _ => {
            let (word, numbers) = text.split_once('-')?;
            let (major, minor) = numbers.split_once('-')?;
            let kind = match word {
                "block" => Kind::Block,
                "char" => Kind::Character,
                _ => return None,
            };
            Some((kind, (major.parse().ok()?, minor.parse().ok()?)))
        }
    }
}

impl fmt::Display for StatRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{:o}", self.uid, self.gid, self.mode)?;
        let Some((kind, (major, minor))) = self.kind else { return Ok(()) };
        match kind {
            Kind::File => f.write_str(":file"),
            Kind::Directory => f.write_str(":dir"),
            Kind::Symlink => f.write_str(":symlink"),
            Kind::Fifo => f.write_str(":pipe"),
            Kind::Socket => f.write_str(":socket"),
            Kind::Block => write!(f, ":block-{major}-{minor}"),
            Kind::Character => write!(f, ":char-{major}-{minor}"),
        }
    }
}
