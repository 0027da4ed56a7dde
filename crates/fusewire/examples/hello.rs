//! A whole file system: one directory with one file.
//!
//! `cargo run -p fusewire --example hello -- MOUNTPOINT [device|uring]`, and `umount MOUNTPOINT` to
//! end it.

use std::path::Path;
use std::sync::Arc;

use fusewire::abi::{Attr, AttrOut, EntryOut, Kstatfs, OpenOut, ROOT_ID, init};
use fusewire::{
    Errno, Handler, MountOptions, Offer, Op, Reply, Request, Session, SessionOptions, Settings, TransportChoice,
};

const FILE: u64 = 2;
const NAME: &[u8] = b"hello.txt";
const TEXT: &[u8] = b"Hello, world!\n";
/// How long the kernel may cache answers, seconds. Nothing ever changes here.
const VALID: u64 = 3600;

struct Hello;

fn attr(nodeid: u64) -> Result<Attr, Errno> {
    let (mode, nlink, size) = match nodeid {
        ROOT_ID => (0o040_555, 2, 0),
        FILE => (0o100_444, 1, TEXT.len() as u64),
        _ => return Err(Errno::ENOENT),
    };
    Ok(Attr { ino: nodeid, mode, nlink, size, blksize: 4096, ..Attr::default() })
}

impl Handler for Hello {
    fn init(&self, _: &Offer) -> Settings {
        // Settings::default() negotiates READDIRPLUS; READDIR is enough here.
        let default = Settings::default();
        Settings { flags: default.flags & !(init::DO_READDIRPLUS | init::READDIRPLUS_AUTO), ..default }
    }

    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let node = request.header.nodeid;
        match request.op {
            Op::Lookup { name } if node == ROOT_ID && name == NAME => {
                let attr = attr(FILE)?;
                reply.entry(&EntryOut {
                    nodeid: FILE,
                    entry_valid: VALID,
                    attr_valid: VALID,
                    attr,
                    ..EntryOut::default()
                })
            }
            Op::Lookup { .. } => reply.no_entry(VALID, 0),
            Op::Getattr { .. } => reply.attr(&AttrOut { attr_valid: VALID, attr: attr(node)?, ..AttrOut::default() }),
            Op::Open { .. } | Op::Opendir { .. } => reply.open(&OpenOut::default()),
            Op::Read { offset, size, .. } => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(TEXT.len());
                let end = start.saturating_add(size as usize).min(TEXT.len());
                reply.bytes(TEXT.get(start..end).unwrap_or_default())
            }
            Op::Readdir { offset, size, .. } => {
                let mut list = reply.directory(size);
                let entries: [(u64, u8, &[u8]); 3] = [(ROOT_ID, 4, b"."), (ROOT_ID, 4, b".."), (FILE, 8, NAME)];
                for ((ino, kind, name), next) in
                    entries.into_iter().zip(1..).skip(usize::try_from(offset).unwrap_or(usize::MAX))
                {
                    if !list.add(ino, next, kind, name) {
                        break;
                    }
                }
                Ok(())
            }
            Op::Statfs => reply.statfs(&Kstatfs { bsize: 4096, frsize: 4096, namelen: 255, ..Kstatfs::default() }),
            Op::Release { .. } | Op::Releasedir { .. } => Ok(()),
            _ => Err(Errno::ENOSYS),
        }
    }

    fn forget(&self, _: u64, _: u64) {}
}

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let Some(mountpoint) = arguments.next() else {
        return Err(std::io::Error::other("usage: hello MOUNTPOINT [device|uring]"));
    };
    let transport = match arguments.next() {
        Some(word) if word == "device" => TransportChoice::Device,
        Some(word) if word == "uring" => TransportChoice::Uring,
        _ => TransportChoice::Auto,
    };
    let options =
        MountOptions { fsname: "hello".into(), subtype: "hello".to_owned(), flags: 1, ..MountOptions::default() };
    let device = fusewire::mount(Path::new(&mountpoint), &options)?;
    let session = Session::start(device, Arc::new(Hello), SessionOptions { transport, ..SessionOptions::default() })?;
    match session.fallback_reason() {
        None => println!("serving over {:?}", session.transport()),
        Some(reason) => println!("serving over {:?}: {reason}", session.transport()),
    }
    session.wait();
    for op in session.counters().snapshot() {
        println!(
            "{:>12} {:>8} requests {:>8} errors {:>10} ns each",
            op.name,
            op.requests,
            op.errors,
            op.total_ns / op.requests.max(1)
        );
    }
    Ok(())
}
