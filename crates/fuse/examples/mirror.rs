//! The smallest mirror: mounts a directory at a second path until it is unmounted, then prints the requests.
//!
//! `cargo run --release -p nacre-fuse --example mirror -- SOURCE MOUNTPOINT
//! [exclusive|watch|revalidate] [WORD...]`, where a word is `device`, `uring`, `served` (no
//! passthrough), `immutable`, `noxattr`, `private` (no default_permissions) or `notify`.
#![allow(clippy::print_stderr, reason = "a program")]

use nacre_fuse::{FuseOptions, Mount, PassthroughChoice, TransportChoice, XattrChoice};
use nacre_layers::host::{Host, HostOptions, prepare_worker};
use nacre_stack::spec::HostCoherence;
use std::{error::Error, sync::Arc};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(source), Some(mountpoint)) = (words.next(), words.next()) else {
        return Err("usage: mirror SOURCE MOUNTPOINT [exclusive|watch|revalidate] [WORD...]".into());
    };
    let mut host = HostOptions { coherence: HostCoherence::Exclusive, ..HostOptions::new(source) };
    let mut options = FuseOptions::new(mountpoint);
    // fusermount3 allows ordinary users to open their mounts to other users only if /etc/fuse.conf permits it.
    options.allow_other = rustix::process::geteuid().is_root();
    options.worker_setup = Some(Arc::new(|| {
        if let Err(error) = prepare_worker() {
            eprintln!("a thread keeps its privileges: {error}");
        }
    }));
    for word in words {
        match word.as_str() {
            "exclusive" => host.coherence = HostCoherence::Exclusive,
            "watch" => host.coherence = HostCoherence::Watch,
            "revalidate" => host.coherence = HostCoherence::Revalidate,
            "device" => options.transport = TransportChoice::Device,
            "uring" => options.transport = TransportChoice::Uring,
            "served" => options.passthrough = PassthroughChoice::Off,
            "immutable" => options.immutable = true,
            "noxattr" => options.xattr = XattrChoice::Off,
            "private" => options.default_permissions = false,
            "notify" => options.notify_watchers = true,
            other => return Err(format!("unknown word: {other}").into()),
        }
    }
    let mount = Mount::start(Arc::new(Host::open(host)?), options)?;
    mount.wait();
    let status = mount.status();
    eprintln!("{:?}, passthrough {:?}", status.transport, status.passthrough);
    for operation in &status.operations {
        let mean = operation.total_ns.checked_div(operation.requests).unwrap_or_default();
        eprintln!(
            "{:>16} {:>9} requests {:>9} errors {:>7} ns each",
            operation.name, operation.requests, operation.errors, mean
        );
    }
    Ok(())
}
