//! What a thread that waits for our answer is about to do: the system call that it is in, and how
//! much it writes.
//!
//! Called in GETATTR for a collected file. The kernel shows the registers of a thread that sleeps
//! in a system call, to whoever may trace it. What cannot be told for certain is unknown: a call
//! that is taken for a read must be one on every architecture that the thread may use.

use std::{
    fs::File,
    io::{self, Read},
    time::Duration,
};

/// A thread that has sent its request may still be on its way to sleep.
const TRIES: u32 = 24;
/// Of these, the first ones without sleeping.
const EAGER: u32 = 4;
const PAUSE: Duration = Duration::from_micros(40);

/// See the file's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It writes so many bytes.
    Writes(u64),
    /// It writes so many vectors, at this address.
    WritesVectors { address: u64, count: u64 },
    /// It reads, seeks or asks.
    Reads,
    /// It cannot be told.
    Unknown,
}

/// System calls that write: those with a length in the third argument, and those with vectors.
#[cfg(target_arch = "x86_64")]
mod calls {
    pub const WRITES: [u64; 2] = [1, 18];
    pub const WRITES_VECTORS: [u64; 3] = [20, 296, 328];
    /// read, fstat, lseek, pread64, readv, preadv, preadv2; `_llseek` of 32-bit processes (their
    /// lseek is 19), lseek of x32 ones. None of these numbers is a call that writes for any of
    /// them.
    pub const READS: [u64; 9] = [0, 5, 8, 17, 19, 295, 327, 140, 0x4000_0008];
}
#[cfg(target_arch = "aarch64")]
mod calls {
    pub const WRITES: [u64; 2] = [64, 68];
    pub const WRITES_VECTORS: [u64; 3] = [66, 70, 287];
    /// read, fstat, lseek, pread64, readv, preadv, preadv2; lseek and `_llseek` of 32-bit
    /// processes. None of these numbers is a call that writes for either.
    pub const READS: [u64; 9] = [63, 80, 62, 67, 65, 69, 286, 19, 140];
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod calls {
    pub const WRITES: [u64; 0] = [];
    pub const WRITES_VECTORS: [u64; 0] = [];
    pub const READS: [u64; 0] = [];
}

/// How many bytes the thread is about to write: `Some(None)` where it writes, or may, and the
/// length cannot be told; `None` where it does not write.
pub(crate) fn writes(tid: u32) -> Option<Option<u64>> {
    match doing(tid) {
        Doing::Writes(length) => Some(Some(length)),
        Doing::WritesVectors { address, count } => Some(nacre_sys::remote::vectors_total(tid, address, count).ok()),
        Doing::Reads => None,
        Doing::Unknown => Some(None),
    }
}

#[expect(clippy::disallowed_methods, reason = "the kernel tells nobody when a thread goes on")]
fn doing(tid: u32) -> Doing {
    if tid == 0 {
        return Doing::Unknown;
    }
    let mut text = [0_u8; 256];
    for tried in 0..TRIES {
        match read(tid, &mut text) {
            Ok(length) => match parse(text.get(..length).unwrap_or_default()) {
                Some(doing) => return doing,
                None if tried < EAGER => std::thread::yield_now(),
                None => std::thread::sleep(PAUSE),
            },
            Err(error) => {
                tracing::debug!(%error, tid, "what a thread is writing cannot be read");
                return Doing::Unknown;
            }
        }
    }
    Doing::Unknown
}

fn read(tid: u32, text: &mut [u8]) -> io::Result<usize> {
    File::open(format!("/proc/{tid}/syscall"))?.read(text)
}

/// What `/proc/TID/syscall` says; `None` where the thread is running: to be asked again.
fn parse(text: &[u8]) -> Option<Doing> {
    let text = std::str::from_utf8(text).unwrap_or_default().trim_end();
    if text == "running" {
        return None;
    }
    let mut words = text.split(' ');
    let call = words.next().and_then(|word| word.parse::<u64>().ok());
    let mut values = [0_u64; 8];
    let mut given = 0;
    for (value, word) in values.iter_mut().zip(words) {
        let Some(parsed) = word.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok()) else {
            return Some(Doing::Unknown);
        };
        *value = parsed;
        given += 1;
    }
    let [_, second, third, _, _, _, stack, instruction] = values;
    // Threads of the kernel, also those that work for a process (io_uring), show a call in which
    // they are not; they have no stack there.
    let Some(call) = call.filter(|_| given == 8 && stack != 0 && instruction != 0) else { return Some(Doing::Unknown) };
    Some(if calls::WRITES.contains(&call) {
        Doing::Writes(third)
    } else if calls::WRITES_VECTORS.contains(&call) {
        Doing::WritesVectors { address: second, count: third }
    } else if calls::READS.contains(&call) {
        Doing::Reads
    } else {
        Doing::Unknown
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn only_what_is_certain_is_taken_for_granted() {
        let tail = "0x3 0x5578 0x64 0x0 0x0 0x0";
        let at = |call: &str, rest: &str| parse(format!("{call} {tail} {rest}\n").as_bytes());
        assert_eq!(at("1", "0x7ffd 0x7f12"), Some(Doing::Writes(100)));
        assert_eq!(at("18", "0x7ffd 0x7f12"), Some(Doing::Writes(100)));
        assert_eq!(at("20", "0x7ffd 0x7f12"), Some(Doing::WritesVectors { address: 0x5578, count: 100 }));
        assert_eq!(at("8", "0x7ffd 0x7f12"), Some(Doing::Reads));
        // sendfile; a thread of the kernel; one that works for io_uring; between two calls; a
        // 32-bit number on 64 bits.
        assert_eq!(at("40", "0x7ffd 0x7f12"), Some(Doing::Unknown));
        assert_eq!(at("0", "0x0 0x0"), Some(Doing::Unknown));
        assert_eq!(at("1", "0x0 0x7f12"), Some(Doing::Unknown));
        assert_eq!(parse(b"-1 0x7ffd 0x7f12\n"), Some(Doing::Unknown));
        assert_eq!(at("1073741825", "0x7ffd 0x7f12"), Some(Doing::Unknown));
        assert_eq!(parse(b""), Some(Doing::Unknown));
        assert_eq!(parse(b"running\n"), None);
    }

    #[test]
    fn a_thread_that_is_gone_is_unknown() {
        assert_eq!(doing(0), Doing::Unknown);
        assert_eq!(writes(u32::MAX), Some(None));
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_thread_in_a_read_is_seen_there() {
        // A read on an empty pipe: the kernel shows the same for a thread that waits for a file
        // system.
        let (reader, writer) = std::io::pipe().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid()).unwrap();
            let mut reader = reader;
            reader.read(&mut [0]).unwrap()
        });
        let tid = receiver.recv().unwrap().as_raw_nonzero().get().cast_unsigned();
        while doing(tid) != Doing::Reads {
            std::thread::yield_now();
        }
        assert_eq!(writes(tid), None);
        drop(writer);
        assert_eq!(waiting.join().unwrap(), 0);
    }
}
