//! Linux FUSE, the kernel's side: protocol 7.45 over the fuse device and over io_uring.
//!
//! This crate implements the protocol and knows nothing of files: a [`Handler`] gets parsed requests and builds
//! replies directly in the transport's buffer. All features of the protocol are available: passthrough ([`Backing`]),
//! all notifications ([`Notifier`]), idmapped mounts, extensions, interrupts ([`blocking`]).
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//! # fn start(handler: Arc<dyn fusewire::Handler>) -> std::io::Result<()> {
//! let device = fusewire::mount(Path::new("/mnt/x"), &fusewire::MountOptions::default())?;
//! let session = fusewire::Session::start(device, handler, fusewire::SessionOptions::default())?;
//! session.wait();
//! # Ok(())
//! # }
//! ```
//! `examples/hello.rs` is a complete file system.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

#[cfg(not(target_os = "linux"))]
compile_error!("FUSE's kernel protocol is Linux' own");

pub mod abi;
mod apart;
mod backing;
mod connection;
mod counters;
mod errno;
#[doc(hidden)]
pub mod fuzz;
mod handler;
mod mount;
mod notify;
mod reply;
mod request;
mod session;
mod sys;

pub use apart::{APART, apart};
pub use backing::{Backing, Passthrough};
pub use counters::{BUCKETS, Counters, OpCounts};
pub use errno::Errno;
pub use handler::{Handler, Offer, Settings};
pub use mount::{
    Device, FusermountRefusal, Identity, Method, MountOptions, carries_mounts, hidden, kept_by, mount, mount_detached,
    mount_on_device, mounted_anywhere, patiently, unmount, unmount_path,
};
pub use notify::Notifier;
pub use reply::{Directory, Reply};
pub use request::{Groups, Header, Op, Request, SecurityContexts};
pub use session::{Agreed, Moment, Observer, Session, SessionOptions, Transport, TransportChoice, blocking, resend};
