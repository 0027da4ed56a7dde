//! INIT: the first request of a connection, always over the device.
//!
//! Called by the session before any thread runs.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::abi::{
    InHeader, InitIn, InitOut, KERNEL_MINOR_VERSION, KERNEL_VERSION, OLDEST_MINOR_VERSION, OutHeader, Pod, init, opcode,
};
use crate::handler::{Handler, Offer, Settings};

/// Size of the buffer for INIT and its future extensions.
const BUFFER: usize = 8192 + 4096;

/// Result of the negotiation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreement {
    pub(super) offer: Offer,
    /// Flags are those in force.
    pub(super) settings: Settings,
    /// Maximum data of one request, bytes; whole pages.
    pub(super) max_io: usize,
    unique: u64,
}

/// Result of the negotiation with the kernel, once for a connection, for a process that takes it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The kernel's offer.
    pub offer: Offer,
    /// The flags in force.
    pub flags: u64,
    /// Maximum data of one request, bytes.
    pub max_io: u32,
}

/// Reads INIT and lets the handler choose. ENODEV if it was unmounted before.
pub(super) fn read_init(device: &OwnedFd, handler: &dyn Handler) -> io::Result<Agreement> {
    let mut buffer = vec![0_u8; BUFFER];
    loop {
        let size = match rustix::io::read(device.as_fd(), &mut buffer) {
            Ok(size) => size,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT) => continue,
            Err(rustix::io::Errno::AGAIN) => {
                let mut fds = [rustix::event::PollFd::new(device, rustix::event::PollFlags::IN)];
                match rustix::event::poll(&mut fds, None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        let message = buffer.get(..size).unwrap_or_default();
        let (header, offer) = parse_init(message)?;
        if offer.major > KERNEL_VERSION {
            // A newer kernel: send our version, it repeats INIT with that.
            reply(
                device,
                header.unique,
                &InitOut { major: KERNEL_VERSION, minor: KERNEL_MINOR_VERSION, ..InitOut::default() },
            )?;
            continue;
        }
        if offer.major < KERNEL_VERSION || offer.minor < OLDEST_MINOR_VERSION {
            let spoken =
                format!("the kernel speaks FUSE {}.{}, 7.{OLDEST_MINOR_VERSION} is needed", offer.major, offer.minor);
            return Err(io::Error::new(io::ErrorKind::Unsupported, spoken));
        }
        return Ok(agree(header.unique, &offer, handler));
    }
}

/// The header and struct of INIT; fields that an older kernel does not send are 0.
fn parse_init(message: &[u8]) -> io::Result<(InHeader, InitIn)> {
    let unexpected = || {
        io::Error::new(io::ErrorKind::InvalidData, "the first request is not INIT: the connection is in use already")
    };
    let header = InHeader::read(message).filter(|header| header.opcode == opcode::INIT).ok_or_else(unexpected)?;
    let body = message.get(size_of::<InHeader>()..).unwrap_or_default();
    let mut whole = [0_u8; size_of::<InitIn>()];
    whole.iter_mut().zip(body).for_each(|(to, from)| *to = *from);
    let offer = InitIn::read(&whole).ok_or_else(unexpected)?;
    Ok((header, offer))
}

fn agree(unique: u64, kernel: &InitIn, handler: &dyn Handler) -> Agreement {
    let mut flags = u64::from(kernel.flags);
    if flags & init::INIT_EXT != 0 {
        flags |= u64::from(kernel.flags2) << 32;
    }
    let offer = Offer { minor: kernel.minor, flags, max_readahead: kernel.max_readahead };
    let mut settings = handler.init(&offer);
    let own = init::INIT_EXT | init::MAX_PAGES;
    settings.flags = ((settings.flags & !init::OVER_IO_URING) | own) & offer.flags;
    settings.max_readahead = settings.max_readahead.min(offer.max_readahead);
    let page = rustix::param::page_size();
    // Without MAX_PAGES the kernel sends 32 pages at most, regardless of our settings. The page count has 16 bits.
    let most = if settings.flags & init::MAX_PAGES != 0 { usize::from(u16::MAX) * page } else { 32 * page };
    let max_io = (settings.max_io as usize).clamp(2 * page, most).next_multiple_of(page).min(most);
    settings.max_io = u32::try_from(max_io).unwrap_or(u32::MAX);
    if settings.flags & init::PASSTHROUGH == 0 {
        settings.max_stack_depth = 0;
    } else {
        settings.max_stack_depth = settings.max_stack_depth.max(1);
    }
    Agreement { offer, settings, max_io, unique }
}

impl Agreement {
    /// Repeats the agreement of a previous process.
    pub(super) fn resumed(agreed: &Agreed, handler: &dyn Handler) -> io::Result<Agreement> {
        let kernel = InitIn {
            major: KERNEL_VERSION,
            minor: agreed.offer.minor,
            max_readahead: agreed.offer.max_readahead,
            flags: agreed.offer.flags as u32,
            flags2: (agreed.offer.flags >> 32) as u32,
            ..InitIn::default()
        };
        let mut agreement = agree(0, &kernel, handler);
        if agreement.settings.flags != agreed.flags {
            let what = format!(
                "what the file system wants of the kernel now ({:x}) is not what was agreed ({:x})",
                agreement.settings.flags, agreed.flags
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        agreement.settings.max_io = agreed.max_io;
        agreement.max_io = agreed.max_io as usize;
        Ok(agreement)
    }

    /// Returns the agreement for the next process.
    pub(super) fn agreed(&self) -> Agreed {
        Agreed { offer: self.offer, flags: self.settings.flags, max_io: self.settings.max_io }
    }

    /// Answers INIT. From then on requests come.
    pub(super) fn answer(&self, device: &OwnedFd, rings: bool) -> io::Result<()> {
        reply(device, self.unique, &self.init_out(rings))
    }

    fn init_out(&self, rings: bool) -> InitOut {
        let settings = &self.settings;
        let flags = settings.flags | if rings { init::OVER_IO_URING } else { 0 };
        let timeout = if flags & init::REQUEST_TIMEOUT != 0 { settings.request_timeout } else { 0 };
        InitOut {
            major: KERNEL_VERSION,
            minor: KERNEL_MINOR_VERSION.min(self.offer.minor),
            max_readahead: settings.max_readahead,
            flags: flags as u32,
            max_background: settings.max_background,
            congestion_threshold: settings.congestion_threshold,
            max_write: settings.max_io,
            time_gran: settings.time_gran,
            max_pages: u16::try_from(self.max_io / rustix::param::page_size()).unwrap_or(u16::MAX),
            flags2: (flags >> 32) as u32,
            max_stack_depth: settings.max_stack_depth,
            request_timeout: timeout,
            ..InitOut::default()
        }
    }
}

fn reply(device: &OwnedFd, unique: u64, out: &InitOut) -> io::Result<()> {
    let header = OutHeader { len: (size_of::<OutHeader>() + size_of::<InitOut>()) as u32, error: 0, unique };
    let message = [header.bytes(), out.bytes()].concat();
    loop {
        match rustix::io::write(device.as_fd(), &message) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            // The request is gone: aborted with its mount.
            Err(rustix::io::Errno::NOENT) => {
                let gone = io::Error::from_raw_os_error(libc::ENODEV);
                return Err(crate::sys::with_context(
                    "the mount was taken away before it could be served".to_owned(),
                    gone,
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::{Reply, Request};

    struct Wants(Settings);

    impl Handler for Wants {
        fn init(&self, _: &Offer) -> Settings {
            self.0
        }
        fn handle(&self, _: &Request<'_>, _: &mut Reply<'_>) -> Result<(), Errno> {
            Err(Errno::ENOSYS)
        }
        fn forget(&self, _: u64, _: u64) {}
    }

    fn kernel(flags: u64) -> InitIn {
        InitIn {
            major: 7,
            minor: 45,
            max_readahead: 131_072,
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            unused: [0; 11],
        }
    }

    #[test]
    fn only_what_is_offered_is_agreed() {
        let all =
            Settings { flags: u64::MAX, max_readahead: u32::MAX, max_io: 1, max_stack_depth: 1, ..Settings::default() };
        let offered = init::ASYNC_READ | init::INIT_EXT | init::PASSTHROUGH | init::MAX_PAGES | init::OVER_IO_URING;
        let agreed = agree(2, &kernel(offered), &Wants(all));
        assert_eq!(agreed.settings.flags, offered & !init::OVER_IO_URING);
        assert_eq!(agreed.settings.max_readahead, 131_072);
        assert_eq!(agreed.max_io, 8192);
        let out = agreed.init_out(true);
        assert_eq!(u64::from(out.flags) | u64::from(out.flags2) << 32, offered);
        assert_eq!((out.max_pages, out.max_write, out.max_stack_depth, out.minor), (2, 8192, 1, 45));
    }

    #[test]
    fn what_was_agreed_is_taken_up_again_or_not_at_all() {
        let wants = |flags, max_io| Wants(Settings { flags, max_io, ..Settings::default() });
        let offered = init::ASYNC_READ | init::INIT_EXT | init::MAX_PAGES | init::PARALLEL_DIROPS;
        let first = agree(2, &kernel(offered), &wants(init::ASYNC_READ, 1 << 20));
        // The maximum request size is the one in the kernel's INIT reply, even if another would be chosen now.
        let again = Agreement::resumed(&first.agreed(), &wants(init::ASYNC_READ, 8192)).unwrap();
        assert_eq!((again.max_io, again.agreed()), (first.max_io, first.agreed()));
        assert!(Agreement::resumed(&first.agreed(), &wants(init::PARALLEL_DIROPS, 1 << 20)).is_err());
    }

    #[test]
    fn flags2_counts_with_the_extension_only() {
        let agreed = agree(
            2,
            &kernel(init::PASSTHROUGH),
            &Wants(Settings { flags: u64::MAX, max_stack_depth: 2, ..Settings::default() }),
        );
        assert_eq!(agreed.settings.flags, 0);
        assert_eq!(agreed.settings.max_stack_depth, 0);
        assert_eq!(agreed.max_io, 32 * rustix::param::page_size());
    }

    #[test]
    fn a_request_of_another_kind_is_refused() {
        let header = InHeader { opcode: opcode::LOOKUP, ..InHeader::default() };
        assert_eq!(parse_init(header.bytes()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(parse_init(&[]).is_err());
    }
}
