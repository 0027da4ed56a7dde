//! Failover of a mount: restores the session and the front end's open files from the records of a previous process.
//!
//! Called by `mount.rs`, once. Open files are restored before any request is read. An open file keeps its descriptor,
//! which is still in the table of this process, where the layer has one; otherwise it is opened again by its name, or
//! its inode number. Files that may have cached writes are opened as well, so that the layer knows of them before it
//! checks free space; and files without a name are kept as long as the kernel knows them.

use super::{
    Head, Survival, Survives,
    opens::{OpenLeft, OpenRecord},
};
use crate::{
    door::Door,
    mount::{Mount, MountError, mount_options, session_options},
    open_files::OpenHandle,
    ops::opens,
    passthrough,
};
use fusewire::{Device, Session, abi::init};
use nacre_sys::descriptors;
use nacre_vfs::{Caller, Errno, FoundOpen, Invalidation, Node, OpenFlags, Opened, Result};
use std::{io, sync::Arc};

/// Flags with which an open file is opened again: it is not truncated or created again.
pub(crate) fn reopened(flags: OpenFlags) -> OpenFlags {
    OpenFlags(flags.0 & !(OpenFlags::TRUNC | OpenFlags::EXCL))
}

impl Survival {
    /// Takes over the session of a previous process.
    pub(crate) fn resume(&self, door: &Arc<Door>) -> std::result::Result<Session, MountError> {
        door.inodes.promote_root(self.head(Head::Promoted) == 1);
        let number = self.mounted_before();
        let agreed = self.agreed();
        if let Some(numbered) = door.layer.capabilities().numbered {
            numbered.agreed_before(agreed.flags & init::POSIX_ACL != 0);
            let collected = agreed.flags & init::WRITEBACK_CACHE != 0;
            door.writeback.decide_again(number, collected, &*door.layer);
        } else if let Some(survives) = &door.survives {
            door.take_up_open_files(survives);
            door.finish_renames(survives);
        }
        let device = self.take_device().map_err(MountError::Session)?;
        let options = &door.options;
        let by_fusermount = self.head(Head::Fusermount) == 1;
        let place = options.mountpoint.clone();
        let device = Device::resumed(device, place, self.identity(), by_fusermount, &mount_options(options));
        let handler = Arc::clone(door) as Arc<dyn fusewire::Handler>;
        let ready = |notifier| {
            door.writeback.start(number, notifier);
            door.go_on();
        };
        Session::resume(device, handler, session_options(options), &agreed, ready).map_err(MountError::Session)
    }
}

impl Mount {
    /// Records the state of the session for the next process, and invalidates what the kernel may have cached while
    /// there was no watch. `last_backing`: see [`crate::passthrough::Passthrough::start`].
    pub(crate) fn survive(&mut self, last_backing: Option<i32>) -> std::result::Result<(), MountError> {
        let door = Arc::clone(self.door());
        let Some(survives) = &door.survives else { return Ok(()) };
        let memory = survives.memory.clone();
        let reason = [
            (self.session.transport() != fusewire::Transport::Device, "requests under way end with io_uring"),
            (!self.session.offer().has(fusewire::abi::init::HAS_RESEND), "this kernel does not send requests again"),
            (door.writeback.on() && !door.inodes.by_number(), "the kernel collects writes"),
            (door.agreement().opens_files_itself && !door.inodes.by_number(), "files are opened without requests"),
        ];
        if let Some((_, why)) = reason.iter().find(|(applies, _)| *applies) {
            memory.give_up(why);
            return Ok(());
        }
        memory.set_session(self.session.agreed().map_err(MountError::Session)?);
        memory.set_mount(self.session.identity(), self.session.is_by_fusermount(), door.inodes.root_is_promoted());
        let first = i32::try_from(memory.head(Head::Backing)).unwrap_or(i32::MAX);
        memory.set(Head::Backing, last_backing.map_or(0, |last| u64::from(last.unsigned_abs())));
        if !memory.resumes() {
            return Ok(());
        }
        // Layers with inode numbers that are writable were changed by nobody else: there the kernel may have newer
        // sizes and times than the layer, and would detach file systems mounted on directories whose names it has to
        // look up again.
        if !door.inodes.by_number() || door.options.read_only {
            door.change(Invalidation::Everything);
        }
        if let Some(end) = last_backing {
            let used = std::mem::take(&mut *survives.backing.lock());
            self.thread("nacre-left", move || {
                door.open.passthrough.close_left(first.max(1), end, |id| used.contains(&id))
            })?;
        }
        Ok(())
    }
}

impl Door {
    /// Takes over the state of a layer whose files are found by inode number.
    pub(super) fn go_on(&self) {
        let capabilities = self.layer.capabilities();
        let Some((survives, numbered)) = self.survives.as_ref().zip(capabilities.numbered) else { return };
        self.take_up_open_files(survives);
        for (place, nodeid) in self.writeback.written.note_in(&survives.memory) {
            if self.writeback.on()
                && let Err(error) = self.written(nodeid)
            {
                tracing::debug!(nodeid, ?error, "a file that was written to is not there any more");
            }
            self.writeback.written.entered(place);
        }
        if self.writeback.on() {
            capabilities.writeback.iter().for_each(|layer| layer.goes_on());
        }
        for number in numbered.kept() {
            let Some(nodeid) = self.inodes.nodeid(number) else { continue };
            if self.inodes.told_since(nodeid).is_none() {
                numbered.forgotten(number);
            } else if !survives.requests.is_named(nodeid) {
                self.inodes.doubt(nodeid);
            }
        }
    }

    /// Restores all open files. Those that cannot be restored are closed: their users get EBADF.
    pub(crate) fn take_up_open_files(&self, survives: &Survives) {
        let (mut taken, mut lost) = (0_u64, 0_u64);
        let all: Vec<OpenRecord> = survives.opens.all().collect();
        // Those without a descriptor are opened by name.
        let named: Vec<u64> = all.iter().filter(|open| open.left.is_none()).map(|open| open.nodeid).collect();
        self.inodes.find_open(&named);
        for open in all {
            match self.take_up(&open) {
                Ok(()) => {
                    survives.granted.lock().insert(open.unique, open.fh);
                    survives.backing.lock().extend(open.backing);
                    taken += 1;
                }
                Err(error) => {
                    tracing::warn!(nodeid = open.nodeid, %error, "an open file could not be taken up");
                    survives.opens.closed(open.fh);
                    lost += 1;
                }
            }
        }
        tracing::info!(taken, lost, restarts = survives.memory.restarts(), "the mount goes on after its process died");
    }

    fn take_up(&self, open: &OpenRecord) -> Result<()> {
        let flags = reopened(open.flags);
        let (node, file) = self.reopen(open, flags)?;
        if self.inodes.node(open.nodeid).is_none() {
            let id = self.layer.id(&node)?;
            if !self.inodes.settle_left(open.nodeid, &node, id) {
                return Err(Errno::ESTALE);
            }
        }
        let direct = self.writeback.on() && flags.writes() && !open.collected;
        let times = if direct { self.begin_direct(&Caller::ROOT, open.nodeid, &node, &file, None) } else { None };
        // Writes of which the kernel may not know.
        times.iter().for_each(|times| times.missed());
        let before = file.backing().filter(|_| flags.writes()).and_then(passthrough::signature);
        let caller = Caller { uid: open.uid, ..Caller::ROOT };
        let handle = OpenHandle {
            before: before.map(|(digest, _)| digest),
            collected: open.collected,
            times,
            ..opens::handle(&caller, open.nodeid, open.flags, &file)
        };
        if open.collected {
            self.writeback.join_unopened(open.nodeid, &file);
        }
        self.open.files.restore(open.fh, handle);
        self.inodes.with(open.nodeid, |record| {
            let state = record.open_state();
            state.add(open.fh, open.flags, Arc::clone(&file));
            self.open.passthrough.resume(state, open.backing);
        });
        Ok(())
    }

    fn reopen(&self, open: &OpenRecord, flags: OpenFlags) -> Result<(Node, Opened)> {
        // Owned from here on: it is closed where it cannot be used.
        let left = open.left.map(|OpenLeft { descriptor, place }| {
            Ok::<_, io::Error>(FoundOpen { descriptor: descriptors::take_over(descriptor)?, place })
        });
        let left = left.transpose().map_err(|_| Errno::EBADF)?;
        let node = self.inodes.node(open.nodeid);
        match (left, self.layer.capabilities().left_open) {
            (Some(left), Some(layer)) => layer.take_up(node.as_ref(), left, flags),
            _ => {
                let node = node.ok_or(Errno::ESTALE)?;
                let file = self.layer.open(&Caller::ROOT, &node, flags)?;
                Ok((node, file))
            }
        }
    }
}
