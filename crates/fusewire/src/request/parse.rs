//! Parses the bytes of a request into an [`Op`].
//!
//! Called by both transports. The device delivers a request's struct and the data after it in one piece, the ring in
//! two areas; so parsing has two arguments: `fixed` (the struct) and `rest` (names, data, extensions).

use super::{Groups, Header, Op, Request, SecurityContexts, ext::extensions};
use crate::abi::{self, InHeader, Pod, flag, opcode};
use crate::errno::Errno;

/// Negotiated features that change the form of requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Form {
    /// SETXATTR has the long form.
    pub(crate) setxattr_ext: bool,
}

/// The size of the struct that precedes names and data in a request, bytes; 0 where there is none
/// (or the opcode is unknown).
pub(crate) fn fixed_size(opcode: u32, form: Form) -> usize {
    match opcode {
        opcode::FORGET => size_of::<abi::ForgetIn>(),
        opcode::GETATTR => size_of::<abi::GetattrIn>(),
        opcode::SETATTR => size_of::<abi::SetattrIn>(),
        opcode::MKNOD => size_of::<abi::MknodIn>(),
        opcode::MKDIR => size_of::<abi::MkdirIn>(),
        opcode::RENAME => size_of::<abi::RenameIn>(),
        opcode::LINK => size_of::<abi::LinkIn>(),
        opcode::OPEN | opcode::OPENDIR => size_of::<abi::OpenIn>(),
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => size_of::<abi::ReadIn>(),
        opcode::WRITE => size_of::<abi::WriteIn>(),
        opcode::RELEASE | opcode::RELEASEDIR => size_of::<abi::ReleaseIn>(),
        opcode::FSYNC | opcode::FSYNCDIR => size_of::<abi::FsyncIn>(),
        opcode::SETXATTR if form.setxattr_ext => size_of::<abi::SetxattrIn>(),
        opcode::SETXATTR => size_of::<abi::SetxattrCompatIn>(),
        opcode::GETXATTR | opcode::LISTXATTR => size_of::<abi::GetxattrIn>(),
        opcode::FLUSH => size_of::<abi::FlushIn>(),
        opcode::INIT => size_of::<abi::InitIn>(),
        opcode::GETLK | opcode::SETLK | opcode::SETLKW => size_of::<abi::LkIn>(),
        opcode::ACCESS => size_of::<abi::AccessIn>(),
        opcode::CREATE | opcode::TMPFILE => size_of::<abi::CreateIn>(),
        opcode::INTERRUPT => size_of::<abi::InterruptIn>(),
        opcode::BMAP => size_of::<abi::BmapIn>(),
        opcode::IOCTL => size_of::<abi::IoctlIn>(),
        opcode::POLL => size_of::<abi::PollIn>(),
        opcode::NOTIFY_REPLY => size_of::<abi::NotifyRetrieveIn>(),
        opcode::BATCH_FORGET => size_of::<abi::BatchForgetIn>(),
        opcode::FALLOCATE => size_of::<abi::FallocateIn>(),
        opcode::RENAME2 => size_of::<abi::Rename2In>(),
        opcode::LSEEK => size_of::<abi::LseekIn>(),
        opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => size_of::<abi::CopyFileRangeIn>(),
        opcode::SYNCFS => size_of::<abi::SyncfsIn>(),
        opcode::STATX => size_of::<abi::StatxIn>(),
        _ => 0,
    }
}

/// Parses a request that needs a reply (not FORGET, BATCH_FORGET, INTERRUPT, NOTIFY_REPLY or INIT, which the
/// transports handle). `fixed` may be longer than the struct (ring); `rest` must end with the request. EIO for
/// contradicting lengths.
pub(crate) fn parse<'a>(header: &InHeader, fixed: &'a [u8], rest: &'a [u8], form: Form) -> Result<Request<'a>, Errno> {
    parse_option(header, fixed, rest, form).ok_or(Errno::EIO)
}

fn parse_option<'a>(header: &InHeader, fixed: &'a [u8], rest: &'a [u8], form: Form) -> Option<Request<'a>> {
    let (mut groups, mut security) = (Groups::default(), SecurityContexts::default());
    let mut rest = rest;
    if header.total_extlen > 0 {
        let (before, area) = rest.split_at_checked(rest.len().checked_sub(usize::from(header.total_extlen) * 8)?)?;
        (groups, security) = extensions(area)?;
        rest = before;
    }
    let op = names(header, fixed, rest)
        .or_else(|| files(header, fixed, rest))
        .or_else(|| attributes(header, fixed, rest, form));
    let op = match op {
        Some(op) => op?,
        None => Op::Unknown(header.opcode),
    };
    Some(Request { header: Header::from(header), op, groups, security })
}

/// Returns the bytes before the first NUL, not empty; and the bytes after the NUL.
fn name(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    if end == 0 {
        return None;
    }
    Some((bytes.get(..end)?, bytes.get(end + 1..)?))
}

/// As [`name`], but may be empty (target of a symbolic link).
fn text(bytes: &[u8]) -> Option<&[u8]> {
    bytes.split(|byte| *byte == 0).next().filter(|text| text.len() < bytes.len())
}

/// Parses operations on names. The outer option is `None` for other opcodes, the inner one for malformed requests.
fn names<'a>(header: &InHeader, fixed: &'a [u8], rest: &'a [u8]) -> Option<Option<Op<'a>>> {
    let op = match header.opcode {
        opcode::LOOKUP => name(rest).map(|(name, _)| Op::Lookup { name }),
        opcode::UNLINK => name(rest).map(|(name, _)| Op::Unlink { name }),
        opcode::RMDIR => name(rest).map(|(name, _)| Op::Rmdir { name }),
        opcode::READLINK => Some(Op::Readlink),
        opcode::SYMLINK => name(rest).and_then(|(name, rest)| Some(Op::Symlink { name, target: text(rest)? })),
        opcode::MKNOD => abi::MknodIn::read(fixed).and_then(|arg| {
            let (name, _) = name(rest)?;
            Some(Op::Mknod { name, mode: arg.mode, rdev: arg.rdev, umask: arg.umask })
        }),
        opcode::MKDIR => abi::MkdirIn::read(fixed).and_then(|arg| {
            let (name, _) = name(rest)?;
            Some(Op::Mkdir { name, mode: arg.mode, umask: arg.umask })
        }),
        opcode::RENAME => abi::RenameIn::read(fixed).and_then(|arg| rename(rest, arg.newdir, 0)),
        opcode::RENAME2 => abi::Rename2In::read(fixed).and_then(|arg| rename(rest, arg.newdir, arg.flags)),
        opcode::LINK => {
            abi::LinkIn::read(fixed).and_then(|arg| Some(Op::Link { nodeid: arg.oldnodeid, name: name(rest)?.0 }))
        }
        opcode::CREATE => abi::CreateIn::read(fixed).and_then(|arg| {
            let (name, _) = name(rest)?;
            Some(Op::Create { name, flags: arg.flags, mode: arg.mode, umask: arg.umask, open_flags: arg.open_flags })
        }),
        opcode::TMPFILE => abi::CreateIn::read(fixed).and_then(|arg| {
            // The kernel sends the name of an anonymous dentry, which is "/".
            Some(Op::Tmpfile {
                name: text(rest)?,
                flags: arg.flags,
                mode: arg.mode,
                umask: arg.umask,
                open_flags: arg.open_flags,
            })
        }),
        _ => return None,
    };
    Some(op)
}

fn rename(rest: &[u8], new_dir: u64, flags: u32) -> Option<Op<'_>> {
    let (name_from, rest) = name(rest)?;
    Some(Op::Rename { name: name_from, new_dir, new_name: name(rest)?.0, flags })
}

/// Parses operations on open files.
fn files<'a>(header: &InHeader, fixed: &'a [u8], rest: &'a [u8]) -> Option<Option<Op<'a>>> {
    let op = match header.opcode {
        opcode::OPEN => abi::OpenIn::read(fixed).map(|arg| Op::Open { flags: arg.flags, open_flags: arg.open_flags }),
        opcode::OPENDIR => abi::OpenIn::read(fixed).map(|arg| Op::Opendir { flags: arg.flags }),
        opcode::READ => abi::ReadIn::read(fixed).map(|arg| Op::Read {
            fh: arg.fh,
            offset: arg.offset,
            size: arg.size,
            flags: arg.flags,
            lock_owner: (arg.read_flags & flag::READ_LOCKOWNER != 0).then_some(arg.lock_owner),
            read_flags: arg.read_flags,
        }),
        opcode::READDIR => {
            abi::ReadIn::read(fixed).map(|arg| Op::Readdir { fh: arg.fh, offset: arg.offset, size: arg.size })
        }
        opcode::READDIRPLUS => {
            abi::ReadIn::read(fixed).map(|arg| Op::Readdirplus { fh: arg.fh, offset: arg.offset, size: arg.size })
        }
        opcode::WRITE => abi::WriteIn::read(fixed).and_then(|arg| {
            let data = rest.get(..arg.size as usize)?;
            Some(Op::Write {
                fh: arg.fh,
                offset: arg.offset,
                data,
                flags: arg.flags,
                write_flags: arg.write_flags,
                lock_owner: (arg.write_flags & flag::WRITE_LOCKOWNER != 0).then_some(arg.lock_owner),
            })
        }),
        opcode::RELEASE => abi::ReleaseIn::read(fixed).map(|arg| Op::Release {
            fh: arg.fh,
            flags: arg.flags,
            release_flags: arg.release_flags,
            lock_owner: (arg.release_flags & flag::RELEASE_FLOCK_UNLOCK != 0).then_some(arg.lock_owner),
        }),
        opcode::RELEASEDIR => abi::ReleaseIn::read(fixed).map(|arg| Op::Releasedir { fh: arg.fh, flags: arg.flags }),
        opcode::FSYNC => {
            abi::FsyncIn::read(fixed).map(|arg| Op::Fsync { fh: arg.fh, datasync: datasync(arg.fsync_flags) })
        }
        opcode::FSYNCDIR => {
            abi::FsyncIn::read(fixed).map(|arg| Op::Fsyncdir { fh: arg.fh, datasync: datasync(arg.fsync_flags) })
        }
        opcode::FLUSH => abi::FlushIn::read(fixed).map(|arg| Op::Flush { fh: arg.fh, lock_owner: arg.lock_owner }),
        opcode::GETLK => abi::LkIn::read(fixed).map(|arg| Op::Getlk {
            fh: arg.fh,
            owner: arg.owner,
            lock: arg.lk,
            flags: arg.lk_flags,
        }),
        opcode::SETLK | opcode::SETLKW => abi::LkIn::read(fixed).map(|arg| Op::Setlk {
            fh: arg.fh,
            owner: arg.owner,
            lock: arg.lk,
            flags: arg.lk_flags,
            wait: header.opcode == opcode::SETLKW,
        }),
        opcode::IOCTL => abi::IoctlIn::read(fixed).and_then(|arg| {
            let input = rest.get(..arg.in_size as usize)?;
            Some(Op::Ioctl { fh: arg.fh, flags: arg.flags, cmd: arg.cmd, arg: arg.arg, input, out_size: arg.out_size })
        }),
        opcode::POLL => abi::PollIn::read(fixed).map(|arg| Op::Poll {
            fh: arg.fh,
            kh: arg.kh,
            flags: arg.flags,
            events: arg.events,
        }),
        opcode::FALLOCATE => abi::FallocateIn::read(fixed).map(|arg| Op::Fallocate {
            fh: arg.fh,
            offset: arg.offset,
            length: arg.length,
            mode: arg.mode,
        }),
        opcode::LSEEK => {
            abi::LseekIn::read(fixed).map(|arg| Op::Lseek { fh: arg.fh, offset: arg.offset, whence: arg.whence })
        }
        opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => {
            abi::CopyFileRangeIn::read(fixed).map(|arg| Op::CopyFileRange {
                fh_in: arg.fh_in,
                off_in: arg.off_in,
                nodeid_out: arg.nodeid_out,
                fh_out: arg.fh_out,
                off_out: arg.off_out,
                len: arg.len,
                flags: arg.flags,
                wide: header.opcode == opcode::COPY_FILE_RANGE_64,
            })
        }
        _ => return None,
    };
    Some(op)
}

fn datasync(flags: u32) -> bool {
    flags & flag::FSYNC_FDATASYNC != 0
}

/// Parses operations on attributes and all others.
fn attributes<'a>(header: &InHeader, fixed: &'a [u8], rest: &'a [u8], form: Form) -> Option<Option<Op<'a>>> {
    let op = match header.opcode {
        opcode::GETATTR => abi::GetattrIn::read(fixed)
            .map(|arg| Op::Getattr { fh: (arg.getattr_flags & flag::GETATTR_FH != 0).then_some(arg.fh) }),
        opcode::SETATTR => abi::SetattrIn::read(fixed).map(Op::Setattr),
        opcode::STATFS => Some(Op::Statfs),
        opcode::SETXATTR => setxattr(fixed, rest, form),
        opcode::GETXATTR => {
            abi::GetxattrIn::read(fixed).and_then(|arg| Some(Op::Getxattr { name: name(rest)?.0, size: arg.size }))
        }
        opcode::LISTXATTR => abi::GetxattrIn::read(fixed).map(|arg| Op::Listxattr { size: arg.size }),
        opcode::REMOVEXATTR => name(rest).map(|(name, _)| Op::Removexattr { name }),
        opcode::ACCESS => abi::AccessIn::read(fixed).map(|arg| Op::Access { mask: arg.mask }),
        opcode::BMAP => abi::BmapIn::read(fixed).map(|arg| Op::Bmap { block: arg.block, blocksize: arg.blocksize }),
        opcode::SYNCFS => Some(Op::Syncfs),
        opcode::STATX => abi::StatxIn::read(fixed).map(|arg| Op::Statx {
            fh: (arg.getattr_flags & flag::GETATTR_FH != 0).then_some(arg.fh),
            flags: arg.sx_flags,
            mask: arg.sx_mask,
        }),
        opcode::DESTROY => Some(Op::Destroy),
        _ => return None,
    };
    Some(op)
}

fn setxattr<'a>(fixed: &'a [u8], rest: &'a [u8], form: Form) -> Option<Op<'a>> {
    let arg = if form.setxattr_ext {
        abi::SetxattrIn::read(fixed)?
    } else {
        let short = abi::SetxattrCompatIn::read(fixed)?;
        abi::SetxattrIn { size: short.size, flags: short.flags, setxattr_flags: 0, padding: 0 }
    };
    let (name, rest) = name(rest)?;
    let value = rest.get(..arg.size as usize)?;
    Some(Op::Setxattr { name, value, flags: arg.flags, setxattr_flags: arg.setxattr_flags })
}
