//! Resent requests: a previous process was killed before it had answered them, and may have carried them out.
//!
//! Called by `door.rs` for every request of a mount that survives its process. Requests that would be refused or
//! applied twice when repeated are recorded before and after they are carried out (`requests.rs`). If a reply was
//! recorded, it is sent again. If a request was only begun, the file system shows whether it was carried out:
//!
//! | request | it was carried out where |
//! |---|---|
//! | CREATE, MKDIR, MKNOD, SYMLINK | the name exists, with this type, created since the request began |
//! | LINK | the name leads to the file |
//! | UNLINK, RMDIR | the name does not exist, or leads to a file created since the request began that the kernel does not know (RMDIR in layers of several steps: the name does not exist) |
//! | RENAME, also an exchange | the file that had the old name has the new one, and not the old one; layers of several steps are asked, and finish the missing steps (`FinishRename`) |
//! | SETXATTR that creates | the attribute has the value, and did not exist before |
//! | SETXATTR of a setting of a union (`user.mergerfs.*`) | its value differs from the one before: `-<` of branches removes one each time |
//! | REMOVEXATTR | the attribute does not exist, and existed before |
//! | WRITE at the end | the file has grown, and the new content is the data, or a part of it |
//! | FALLOCATE that changes the length | the length has changed |
//!
//! A rename of several steps is also finished where it does not come again, as its caller was killed, too.
//!
//! Where nobody but the mount changes anything (layers whose files are found by inode number), a file was created
//! since the request began if it did not exist at that time, regardless of clocks; and a name that exists has not
//! been removed yet.
//!
//! All other requests are carried out once more, which changes nothing: a cage does not charge again for blocks that
//! the file already has, where the source's file system reports them (tmpfs does not report allocated, unwritten
//! blocks). No other user of the mount can have interfered: the kernel locks the directory, or the file, as long as
//! the caller waits. Changes of the source itself by others at the same moment cannot be distinguished.

use super::{
    Survives,
    requests::{Facts, Noted, PanicReply, RenameRecord, node_of},
    restore::reopened,
};
use crate::{
    door::{Door, caller, name},
    failure::Outcome,
    inodes::Found,
    ops::opens::layer_flags,
    wire,
};
use fusewire::{Header, Op, Reply, Request, abi, abi::fopen};
use nacre_sys::clocks::{self, Clock};
use nacre_vfs::{
    Attr, Caller, Entry, Errno, FileId, FinishRename, InterruptedRename, Kind, Node, OpenFlags, RenameFlags, Time,
};
use std::time::Duration;

/// Facts recorded about a name that is about to be created.
const NOT_THERE: u64 = 1;
const THERE: u64 = 2;
/// `XATTR_CREATE`.
const XATTR_CREATE: u32 = 1;
/// Prefix of extended attributes that are settings of a union.
const SETTING: &[u8] = b"user.mergerfs.";
/// An identity that no file has.
const NO_FILE: FileId = FileId { fs: 0, ino: 0, generation: 0 };

/// The old and the new name of a rename, whose old directory is the request's node.
#[derive(Clone, Copy)]
struct RenameNames<'a> {
    old: &'a [u8],
    new_dir: u64,
    new: &'a [u8],
    flags: u32,
}

impl Door {
    /// Handles a request of a mount that survives its process.
    pub(crate) fn handle_noted(&self, survives: &Survives, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        if !is_noted(&request.op) {
            return self.dispatch(request, reply);
        }
        let unique = request.header.unique & !abi::UNIQUE_RESEND;
        let comes_again = request.header.unique != unique;
        let before = if comes_again { survives.requests.before(unique) } else { None };
        match before {
            Some(noted) => survives.requests.begin(unique, noted.begun, noted.facts, noted.rename.as_ref())?,
            None => self.note_begun(survives, request)?,
        }
        let panics = PanicReply(&survives.requests);
        let done = match before {
            Some(Noted { answer: Some(Ok(body)), .. }) => self.answer_again(request, body, reply),
            Some(Noted { answer: Some(Err(error)), .. }) => Err(crate::failure::Failure(*error)),
            Some(noted) => self.finish(survives, noted, request, reply),
            None => self.dispatch(request, reply),
        };
        drop(panics);
        survives.requests.answer(match &done {
            Ok(()) => Ok(reply.built()),
            Err(failure) => Err(failure.0),
        });
        done
    }

    /// Sends a recorded reply again. The lookup in it is counted now, where lookup counts are not recorded.
    fn answer_again(&self, request: &Request<'_>, body: &[u8], reply: &mut Reply<'_>) -> Outcome {
        if is_making(&request.op)
            && let Some(nodeid) = node_of(body)
        {
            self.inodes.told_again(nodeid);
        }
        Ok(reply.bytes(body)?)
    }

    /// Records that a request is about to be carried out.
    pub(super) fn note_begun(&self, survives: &Survives, request: &Request<'_>) -> Outcome {
        let facts = self.facts(request).unwrap_or_default();
        let rename = self.recorded_rename(request);
        survives.requests.begin(request.header.unique & !abi::UNIQUE_RESEND, now(), facts, rename.as_ref())
    }

    /// Returns a rename for its record, where a layer takes several steps for it.
    fn recorded_rename(&self, request: &Request<'_>) -> Option<RenameRecord> {
        let Op::Rename { name, new_dir, new_name, flags } = request.op else { return None };
        self.layer.capabilities().interrupted?;
        let Header { nodeid: parent, uid, gid, .. } = request.header;
        let (name, new_name) = (name.to_vec(), new_name.to_vec());
        Some(RenameRecord { parent, name, new_parent: new_dir, new_name, flags, uid, gid })
    }

    /// Finishes the renames in whose middle the previous process was killed: the kernel does not send one again if its
    /// caller was killed as well. Called before any request is read, so that nobody has seen the names since.
    pub(super) fn finish_renames(&self, survives: &Survives) {
        for (unique, noted) in survives.requests.unanswered_renames() {
            let Some(rename) = &noted.rename else { continue };
            let RenameRecord { parent, new_parent, flags, uid, gid, .. } = *rename;
            let header = Header { unique, opcode: 0, nodeid: parent, uid, gid, pid: 0 };
            let names = RenameNames { old: &rename.name, new_dir: new_parent, new: &rename.new_name, flags };
            let done = self.has_moved(&header, &noted, names).and_then(|has_moved| match has_moved {
                true => self.note_moved(&header, names),
                false => self.with_interrupted(&header, &noted, names, |layer, rename| Ok(layer.undo_rename(rename)?)),
            });
            if let Err(failure) = done {
                tracing::warn!(?failure, "a rename in whose middle the previous process was killed is not finished");
            }
        }
        survives.requests.renames_are_finished();
    }

    /// Returns the facts to be recorded before a request is carried out.
    fn facts(&self, request: &Request<'_>) -> Outcome<Facts> {
        let header = &request.header;
        Ok(match request.op {
            Op::Rename { name: old, new_dir, new_name, .. } => {
                let parent = self.node(header.nodeid)?;
                let moving = self.layer.lookup(&caller(header), &parent, name(old)?)?.attr.id;
                let replaced = match self.layer.capabilities().interrupted {
                    Some(_) => self.there(&Header { nodeid: new_dir, ..*header }, new_name)?,
                    None => None,
                };
                let replaced = replaced.map_or(NO_FILE, |(.., entry)| entry.attr.id);
                [moving.fs, moving.ino, moving.generation, replaced.fs, replaced.ino, replaced.generation]
            }
            Op::Create { name, .. } | Op::Mkdir { name, .. } | Op::Mknod { name, .. } | Op::Symlink { name, .. }
                if self.inodes.by_number() =>
            {
                one_fact(if self.there(header, name)?.is_some() { THERE } else { NOT_THERE })
            }
            Op::Setxattr { name, .. } if name.starts_with(SETTING) => [THERE, self.setting(header, name)?, 0, 0, 0, 0],
            Op::Setxattr { name, .. } | Op::Removexattr { name } => {
                let node = self.node(header.nodeid)?;
                match self.layer.getxattr(&caller(header), &node, name, &mut []) {
                    Ok(_) => one_fact(THERE),
                    Err(Errno::ENODATA) => one_fact(NOT_THERE),
                    Err(error) => return Err(error.into()),
                }
            }
            Op::Write { fh, .. } | Op::Fallocate { fh, .. } => one_fact(self.size(header, fh)?.saturating_add(1)),
            _ => Facts::default(),
        })
    }

    /// Answers a request that was begun before.
    fn finish(&self, survives: &Survives, noted: &Noted, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let header = &request.header;
        match request.op {
            Op::Create { name, flags, .. } => {
                if self.created_before(header, name, reply)? {
                    return Ok(());
                }
                if let Some((parent, id, entry)) = self.made_since(header, name, noted, Some(Kind::File))? {
                    let flags = reopened(layer_flags(flags));
                    let file = self.layer.open(&caller(header), &entry.node, flags)?;
                    let out = self.found(&entry, Found::at(header.nodeid, id, name), self.new_name_time(&parent));
                    return self.created(header, out, &entry, file, flags, reply);
                }
            }
            Op::Tmpfile { .. } if self.created_before(header, &[], reply)? => return Ok(()),
            Op::Mkdir { name, .. } => return self.finish_making(noted, request, name, Some(Kind::Directory), reply),
            Op::Symlink { name, .. } => return self.finish_making(noted, request, name, Some(Kind::Symlink), reply),
            Op::Mknod { name, mode, .. } => {
                return self.finish_making(noted, request, name, wire::mknod_kind(mode), reply);
            }
            Op::Link { nodeid, name } => {
                let linked = self.inodes.node_and_id(nodeid).map(|(_, id)| id);
                if let Some((parent, id, entry)) =
                    self.there(header, name)?.filter(|(.., entry)| Some(entry.attr.id) == linked)
                {
                    return self.entered(&entry, &parent, Found::at(header.nodeid, id, name), reply);
                }
            }
            Op::Unlink { name } | Op::Rmdir { name } => {
                // A file that was copied up since is younger than its name, but the kernel knows it. A directory of
                // which a branch was removed may have another number.
                let in_steps =
                    matches!(request.op, Op::Rmdir { .. }) && self.layer.capabilities().interrupted.is_some();
                let is_it = |attr: &Attr| {
                    in_steps
                        || self.inodes.by_number()
                        || self.inodes.find(&attr.id).is_some()
                        || !is_since(attr, noted.begun)
                };
                if !self.there(header, name)?.is_some_and(|(.., entry)| is_it(&entry.attr)) {
                    return Ok(());
                }
            }
            Op::Rename { name, new_dir, new_name, flags } => {
                let names = RenameNames { old: name, new_dir, new: new_name, flags };
                if self.has_moved(header, noted, names)? {
                    return self.note_moved(header, names);
                }
            }
            Op::Setxattr { name, .. } if name.starts_with(SETTING) => {
                let [_, before, ..] = noted.facts;
                if before != 0 && self.setting(header, name)? != before {
                    return Ok(());
                }
            }
            Op::Setxattr { name, value, .. } if noted.facts.first() != Some(&THERE) => {
                let mut known = vec![0; value.len()];
                let node = self.node(header.nodeid)?;
                let size = self.layer.getxattr(&caller(header), &node, name, &mut known);
                if size == Ok(value.len()) && known == value {
                    return Ok(());
                }
            }
            Op::Removexattr { .. } if noted.facts.first() != Some(&NOT_THERE) => {
                return match self.dispatch(request, reply) {
                    Err(failure) if failure == Errno::ENODATA.into() => Ok(()),
                    other => other,
                };
            }
            Op::Write { fh, data, .. } => return self.finish_append(noted, request, (fh, data), reply),
            Op::Fallocate { fh, length, .. } => {
                let before = noted.facts.first().and_then(|size| size.checked_sub(1));
                if before.is_some_and(|before| self.size(header, fh).is_ok_and(|now| now.abs_diff(before) == length)) {
                    return Ok(());
                }
            }
            _ => {}
        }
        tracing::debug!(
            opcode = header.opcode,
            restarts = survives.memory.restarts(),
            "a request is carried out again"
        );
        self.dispatch(request, reply)
    }

    /// Returns a checksum of a setting's value (FNV-1a); for a missing setting, that of the empty value.
    fn setting(&self, header: &Header, name: &[u8]) -> Outcome<u64> {
        let node = self.node(header.nodeid)?;
        let size = self.layer.getxattr(&caller(header), &node, name, &mut []).unwrap_or(0);
        let mut value = vec![0; size];
        if size > 0 {
            let read = self.layer.getxattr(&caller(header), &node, name, &mut value)?;
            value.truncate(read);
        }
        Ok(value
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)))
    }

    fn finish_making(
        &self,
        noted: &Noted,
        request: &Request<'_>,
        name: &[u8],
        kind: Option<Kind>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        match self.made_since(&request.header, name, noted, kind)? {
            Some((parent, id, entry)) => {
                self.entered(&entry, &parent, Found::at(request.header.nodeid, id, name), reply)
            }
            None => self.dispatch(request, reply),
        }
    }

    /// Appends the missing part of the data.
    fn finish_append(
        &self,
        noted: &Noted,
        request: &Request<'_>,
        (fh, data): (u64, &[u8]),
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let Some(before) = noted.facts.first().and_then(|size| size.checked_sub(1)) else {
            return self.dispatch(request, reply);
        };
        let handle = self.handle_of(fh)?;
        let there = self.size(&request.header, fh)?.saturating_sub(before).min(data.len() as u64) as usize;
        let reader = if handle.flags.reads() {
            Some(std::sync::Arc::clone(&handle.file))
        } else {
            // The writer may not be allowed to read, and neither may this process (mode 0200): then only the length
            // shows how much was written.
            match self.layer.open(&Caller::ROOT, &self.node(handle.nodeid)?, OpenFlags::READ) {
                Err(Errno::EACCES | Errno::EPERM) => None,
                opened => Some(opened?),
            }
        };
        if let Some(reader) = reader {
            let mut known = vec![0; there];
            let read = reader.read(&mut known, before)?;
            if read != there || data.get(..there) != Some(known.as_slice()) {
                return self.dispatch(request, reply);
            }
        }
        let rest = data.get(there..).unwrap_or_default();
        let written = there + if rest.is_empty() { 0 } else { handle.file.append(rest)? };
        Ok(reply.written(u32::try_from(written).map_err(|_| Errno::EIO)?)?)
    }

    /// Answers a creation whose open file was recorded.
    fn created_before(&self, header: &Header, name: &[u8], reply: &mut Reply<'_>) -> Outcome<bool> {
        let Some((nodeid, granted)) = self.granted_before(header) else { return Ok(false) };
        let handle = self.handle_of(granted.fh)?;
        let node = self.node(nodeid)?;
        let attr = self.layer.getattr(&caller(header), &node, Some(&*handle.file))?;
        // Its lookup was counted when the file was created.
        let names = if name.is_empty() { Duration::ZERO } else { self.new_name_time(&self.node(header.nodeid)?) };
        let out = wire::entry(nodeid, &self.with_sector(nodeid, &attr), names, Duration::ZERO);
        reply.created(&out, &granted)?;
        Ok(true)
    }

    /// Returns the open file that a previous process recorded for a resent request: the node id and the reply.
    pub(crate) fn granted_before(&self, header: &Header) -> Option<(u64, abi::OpenOut)> {
        let unique = header.unique & !abi::UNIQUE_RESEND;
        if header.unique == unique {
            return None;
        }
        let fh = *self.survives.as_ref()?.granted.lock().get(&unique)?;
        let handle = self.open.files.get(fh)?;
        let id = self.inodes.with(handle.nodeid, |record| record.open_state_if_any()?.io.backing_id()).flatten();
        let mut out = abi::OpenOut { fh, open_flags: self.always(), backing_id: id.unwrap_or(0) };
        if self.writeback.on() {
            out.open_flags |= fopen::KEEP_CACHE;
            if handle.times.is_some() {
                out.open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
            }
        } else if id.is_some() {
            out.open_flags |= fopen::PASSTHROUGH;
        } else if self.options.direct_io {
            out.open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        }
        Some((handle.nodeid, out))
    }

    /// Looks up a name; returns the file with the directory and its identity, `None` where the name does not exist.
    /// After an error it is unknown whether the request was carried out.
    fn there(&self, header: &Header, bytes: &[u8]) -> Outcome<Option<(Node, FileId, Entry)>> {
        let (parent, id) = self.parent(header.nodeid)?;
        match self.layer.lookup(&caller(header), &parent, name(bytes)?) {
            Ok(entry) => Ok(Some((parent, id, entry))),
            Err(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn made_since(
        &self,
        header: &Header,
        bytes: &[u8],
        noted: &Noted,
        kind: Option<Kind>,
    ) -> Outcome<Option<(Node, FileId, Entry)>> {
        let is_its_own = |attr: &Attr| match noted.facts.first() {
            Some(&THERE) => false,
            Some(&NOT_THERE) => true,
            _ => is_since(attr, noted.begun),
        };
        let there = self.there(header, bytes)?;
        Ok(there.filter(|(.., entry)| Some(entry.attr.kind) == kind && is_its_own(&entry.attr)))
    }

    fn has_moved(&self, header: &Header, noted: &Noted, names: RenameNames<'_>) -> Outcome<bool> {
        if noted.facts == Facts::default() {
            return Ok(false);
        }
        if self.layer.capabilities().interrupted.is_some() {
            return self.with_interrupted(header, noted, names, |layer, rename| Ok(layer.finish_rename(rename)?));
        }
        let [fs, ino, generation, ..] = noted.facts;
        let moving = FileId { fs, ino, generation };
        let is_at = |nodeid: u64, name: &[u8]| {
            let there = self.there(&Header { nodeid, ..*header }, name)?;
            Outcome::Ok(there.is_some_and(|(.., entry)| entry.attr.id == moving))
        };
        Ok(!is_at(header.nodeid, names.old)? && is_at(names.new_dir, names.new)?)
    }

    /// Calls a layer that takes several steps for a rename with one that was begun; nothing is done for other layers.
    fn with_interrupted<T: Default>(
        &self,
        header: &Header,
        noted: &Noted,
        names: RenameNames<'_>,
        act: impl FnOnce(&dyn FinishRename, &InterruptedRename<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let Some(layer) = self.layer.capabilities().interrupted else { return Ok(T::default()) };
        let [fs, ino, generation, replaced_fs, replaced_ino, replaced_generation] = noted.facts;
        let replaced = FileId { fs: replaced_fs, ino: replaced_ino, generation: replaced_generation };
        let nanoseconds = noted.begun % 1_000_000_000;
        let rename = InterruptedRename {
            caller: &caller(header),
            begun: Time { sec: (noted.begun / 1_000_000_000).cast_signed(), nsec: nanoseconds as u32 },
            parent: &self.node(header.nodeid)?,
            name: name(names.old)?,
            new_parent: &self.node(names.new_dir)?,
            new_name: name(names.new)?,
            moving: FileId { fs, ino, generation },
            replaced: Some(replaced).filter(|replaced| *replaced != NO_FILE),
            exchange: RenameFlags(names.flags).has(RenameFlags::EXCHANGE),
            whiteout: RenameFlags(names.flags).has(RenameFlags::WHITEOUT),
        };
        act(layer, &rename)
    }

    /// Updates our state after a rename that was carried out before.
    fn note_moved(&self, header: &Header, names: RenameNames<'_>) -> Outcome {
        let RenameNames { old, new_dir, new, flags } = names;
        let (caller, (to, to_id)) = (caller(header), self.parent(new_dir)?);
        self.moved(&caller, &to, (new_dir, to_id), name(new)?);
        if RenameFlags(flags).has(RenameFlags::EXCHANGE) {
            let (from, from_id) = self.parent(header.nodeid)?;
            self.moved(&caller, &from, (header.nodeid, from_id), name(old)?);
        }
        Ok(())
    }

    fn size(&self, header: &Header, fh: u64) -> Outcome<u64> {
        let handle = self.handle_of(fh)?;
        let node = self.node(handle.nodeid)?;
        Ok(self.layer.getattr(&caller(header), &node, Some(&*handle.file))?.size)
    }
}

fn one_fact(fact: u64) -> Facts {
    [fact, 0, 0, 0, 0, 0]
}

/// Whether a request is recorded before and after it is carried out.
fn is_noted(op: &Op<'_>) -> bool {
    match op {
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } | Op::Removexattr { .. } => true,
        Op::Setxattr { flags, name, .. } => flags & XATTR_CREATE != 0 || name.starts_with(SETTING),
        Op::Write { flags, write_flags, .. } => {
            OpenFlags(*flags).appends() && write_flags & abi::flag::WRITE_CACHE == 0
        }
        // Where it does not change the length, the repetition may be refused for the space that the first run has
        // taken itself, though the range is zeroed or allocated.
        Op::Fallocate { .. } => true,
        _ => is_making(op),
    }
}

/// Whether the reply begins with a node whose lookup it counts.
fn is_making(op: &Op<'_>) -> bool {
    matches!(
        op,
        Op::Create { .. }
            | Op::Tmpfile { .. }
            | Op::Mkdir { .. }
            | Op::Mknod { .. }
            | Op::Symlink { .. }
            | Op::Link { .. }
    )
}

/// Whether a file was created at this time or later. For a clock of whole seconds only the second counts.
fn is_since(attr: &Attr, begun: u64) -> bool {
    let made = attr.btime.unwrap_or(attr.ctime);
    let begun_sec = (begun / 1_000_000_000).cast_signed();
    let begun_nsec = begun % 1_000_000_000;
    made.sec > begun_sec || made.sec == begun_sec && (made.nsec == 0 || u64::from(made.nsec) >= begun_nsec)
}

/// Returns the current time, nanoseconds since 1970, by the clock that file systems use for their times.
fn now() -> u64 {
    clocks::now(Clock::RealtimeCoarse).as_nanos() as u64
}

#[cfg(test)]
mod unit {
    use super::*;
    #[test]
    fn answers_to_allocations_are_noted() {
        for mode in [0, 1, 3, 0x10, 0x11, 8, 0x20] {
            assert!(is_noted(&Op::Fallocate { fh: 0, offset: 0, length: 4096, mode }), "{mode:#x}");
        }
    }

    #[test]
    fn files_from_before_a_request_are_not_its_own() {
        let attr = |sec, nsec| Attr {
            btime: Some(Time { sec, nsec }),
            ..crate::self_io::replacing::vanished(FileId { fs: 0, ino: 0, generation: 0 })
        };
        let begun = 7_000_000_005;
        for (sec, nsec, since) in [(6, 999_999_999, false), (7, 4, false), (7, 5, true), (7, 0, true), (8, 1, true)] {
            assert_eq!(is_since(&attr(sec, nsec), begun), since, "{sec}.{nsec}");
        }
        let unborn = Attr { btime: None, ctime: Time { sec: 8, nsec: 0 }, ..attr(1, 1) };
        assert!(is_since(&unborn, begun));
    }
}
