//! Finds out what a thread that waits for our reply is about to do: the system call that it is in, and the range of
//! its write.
//!
//! Called in GETATTR for a file with cached writes. The kernel shows the registers of a thread that sleeps in a
//! system call, and the positions of its open files, to processes that may trace it. While a thread is in write(2),
//! no other thread moves the position of that open file (`f_pos_lock`). Where it is not certain, the result is
//! unknown: io_uring and libaio, threads of the kernel. A thread may use the numbers of its own architecture or of
//! the 32-bit one. A call counts as a read if its number is that of a writing call in neither, and as a write if its
//! number in the other is that of a call that reads and writes no file.

use nacre_vfs::WriteAhead;
use std::{
    fs::File,
    io::{self, Read},
    time::Duration,
};

/// Maximum number of attempts: a thread that has sent its request may not be asleep yet.
const TRIES: u32 = 24;
/// Number of attempts without a pause.
const EAGER: u32 = 4;
const PAUSE: Duration = Duration::from_micros(40);

/// System call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// A write of this many bytes.
    Writes(u64, Place),
    /// A write of this many vectors, at this address.
    WritesVectors { address: u64, count: u64, place: Place },
    /// A write whose length and place are not looked up.
    WritesUnmeasured,
    /// A copy between two open files by sendfile(2), splice(2) or copy_file_range(2), to this descriptor.
    Transfers { target: u64 },
    /// A read, seek, query of attributes, or execution.
    Reads,
    /// Not known.
    Unknown,
}

/// Location of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The descriptor.
    descriptor: u64,
    /// Offset in the call's arguments; `None` for the position of the open file.
    offset: Option<u64>,
    /// `O_APPEND` of the open file does not apply.
    ignores_append: bool,
}

/// What a thread is about to do to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// It does not write.
    Reads,
    /// It writes, at this offset and so much, as far as both are known.
    Writes(WriteAhead),
    /// It reads or writes.
    Unknown,
}

impl Ahead {
    /// The write that may follow.
    pub fn possible_write(self) -> Option<WriteAhead> {
        match self {
            Ahead::Reads => None,
            Ahead::Writes(write) => Some(write),
            Ahead::Unknown => Some(WriteAhead::default()),
        }
    }
}

/// `RWF_APPEND` and `RWF_NOAPPEND` of pwritev2(2).
const AT_THE_END: u64 = 0x10;
const NOT_AT_THE_END: u64 = 0x20;
/// `O_APPEND`.
const O_APPEND: u64 = 0o2000;

/// System calls that write: those with a length in the third argument, and those with vectors; among both, those with
/// an offset in the fourth. Those that are not looked at more closely, as their arguments are those of 32-bit
/// processes. Those that copy, by the argument with the target.
#[cfg(target_arch = "x86_64")]
mod calls {
    /// write, pwrite64; write of 32-bit processes, which is stat here.
    pub const WRITES: [u64; 3] = [1, 18, 4];
    pub const WRITES_VECTORS: [u64; 3] = [20, 296, 328];
    pub const PLACED: [u64; 3] = [18, 296, 328];
    pub const FLAGGED: u64 = 328;
    /// writev, pwrite64, pwritev, pwritev2 of 32-bit processes.
    pub const WRITES_UNMEASURED: [u64; 4] = [146, 181, 334, 379];
    /// sendfile.
    pub const TRANSFERS_TO_FIRST: [u64; 1] = [40];
    /// splice, copy_file_range.
    pub const TRANSFERS_TO_THIRD: [u64; 2] = [275, 326];
    /// read, fstat, lseek, pread64, readv, preadv, preadv2, execve, execveat; of 32-bit processes read, readv,
    /// pread64, preadv, preadv2, `_llseek`, execve, execveat (their lseek is 19); of x32 ones read, lseek, pread64,
    /// readv, preadv, preadv2, execve, execveat.
    pub const READS: [u64; 25] = [
        0,
        5,
        8,
        17,
        19,
        295,
        327,
        59,
        322,
        3,
        145,
        180,
        333,
        378,
        140,
        11,
        358,
        0x4000_0000,
        0x4000_0008,
        0x4000_0011,
        0x4000_0203,
        0x4000_0216,
        0x4000_0222,
        0x4000_0208,
        0x4000_0221,
    ];
}
#[cfg(target_arch = "aarch64")]
mod calls {
    /// write, pwrite64; write of 32-bit processes, which is io_getevents here.
    pub const WRITES: [u64; 3] = [64, 68, 4];
    pub const WRITES_VECTORS: [u64; 3] = [66, 70, 287];
    pub const PLACED: [u64; 3] = [68, 70, 287];
    pub const FLAGGED: u64 = 287;
    /// writev, pwrite64, pwritev, pwritev2 of 32-bit processes.
    pub const WRITES_UNMEASURED: [u64; 4] = [146, 181, 362, 393];
    /// sendfile.
    pub const TRANSFERS_TO_FIRST: [u64; 1] = [71];
    /// splice, copy_file_range.
    pub const TRANSFERS_TO_THIRD: [u64; 2] = [76, 285];
    /// read, fstat, lseek, pread64, readv, preadv, preadv2, execve, execveat; of 32-bit processes read, lseek, readv,
    /// pread64, preadv, preadv2, `_llseek`, execve, execveat.
    pub const READS: [u64; 18] = [63, 80, 62, 67, 65, 69, 286, 221, 281, 3, 19, 145, 180, 361, 392, 140, 11, 387];
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod calls {
    pub const WRITES: [u64; 0] = [];
    pub const WRITES_VECTORS: [u64; 0] = [];
    pub const PLACED: [u64; 0] = [];
    pub const FLAGGED: u64 = u64::MAX;
    pub const WRITES_UNMEASURED: [u64; 0] = [];
    pub const TRANSFERS_TO_FIRST: [u64; 0] = [];
    pub const TRANSFERS_TO_THIRD: [u64; 0] = [];
    pub const READS: [u64; 0] = [];
}

/// Returns what the thread is about to do to a file with this inode number, in whose request it waits. The offset of
/// a write is looked up if it is `wanted`.
pub(crate) fn ahead(tid: u32, wanted: bool, inode_number: impl FnOnce() -> Option<u64>) -> Ahead {
    let offset = |place: Place| if wanted { offset(tid, place) } else { None };
    match doing(tid) {
        Doing::Writes(length, place) => Ahead::Writes(WriteAhead { offset: offset(place), length: Some(length) }),
        Doing::WritesVectors { address, count, place } => {
            let length = nacre_sys::remote::vectors_total(tid, address, count).ok();
            Ahead::Writes(WriteAhead { offset: offset(place), length })
        }
        Doing::WritesUnmeasured => Ahead::Writes(WriteAhead::default()),
        Doing::Transfers { target } => match open_inode(tid, target).zip(inode_number()) {
            Some((target, asked)) if target == asked => Ahead::Writes(WriteAhead::default()),
            Some(_) => Ahead::Reads,
            None => Ahead::Unknown,
        },
        Doing::Reads => Ahead::Reads,
        Doing::Unknown => Ahead::Unknown,
    }
}

/// Returns the offset of a thread's write; `None` for the end of the file, and where it is not known.
fn offset(tid: u32, place: Place) -> Option<u64> {
    let info = descriptor_info(tid, place.descriptor)?;
    let position = value(&info, "pos:")?.parse().ok()?;
    let flags = u64::from_str_radix(value(&info, "flags:")?, 8).ok()?;
    // At the end, whatever offset the call has (pwrite(2)).
    if flags & O_APPEND != 0 && !place.ignores_append { None } else { Some(place.offset.unwrap_or(position)) }
}

/// Returns the inode number of a thread's open file; `None` before Linux 5.14, which does not show it.
fn open_inode(tid: u32, descriptor: u64) -> Option<u64> {
    value(&descriptor_info(tid, descriptor)?, "ino:")?.parse().ok()
}

/// Reads the beginning of `/proc/TID/fdinfo/N`.
fn descriptor_info(tid: u32, descriptor: u64) -> Option<String> {
    let mut text = [0_u8; 256];
    let read = File::open(format!("/proc/{tid}/fdinfo/{descriptor}")).and_then(|mut file| file.read(&mut text));
    let length = read.inspect_err(|error| tracing::debug!(%error, tid, "an open file of a thread cannot be read"));
    Some(std::str::from_utf8(text.get(..length.ok()?)?).ok()?.to_owned())
}

/// The value of a key in `/proc/TID/fdinfo/N`.
fn value<'a>(info: &'a str, key: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(key)).map(str::trim)
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

/// Parses `/proc/TID/syscall`; `None` where the thread is running: to be read again.
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
    let [first, second, third, fourth, _, sixth, stack, instruction] = values;
    // Kernel threads, also those that work for a process (io_uring), show a call that they are not in; they have no
    // stack there.
    let Some(call) = call.filter(|_| given == 8 && stack != 0 && instruction != 0) else { return Some(Doing::Unknown) };
    // pwritev2(2) takes -1 for the position of the open file.
    let offset = (calls::PLACED.contains(&call) && fourth != u64::MAX).then_some(fourth);
    let ignores_append = call == calls::FLAGGED && sixth & NOT_AT_THE_END != 0;
    let place = Place { descriptor: first, offset, ignores_append };
    Some(if call == calls::FLAGGED && sixth & AT_THE_END != 0 {
        Doing::WritesVectors { address: second, count: third, place: Place { descriptor: u64::MAX, ..place } }
    } else if calls::WRITES.contains(&call) {
        Doing::Writes(third, place)
    } else if calls::WRITES_VECTORS.contains(&call) {
        Doing::WritesVectors { address: second, count: third, place }
    } else if calls::WRITES_UNMEASURED.contains(&call) {
        Doing::WritesUnmeasured
    } else if calls::TRANSFERS_TO_FIRST.contains(&call) {
        Doing::Transfers { target: first }
    } else if calls::TRANSFERS_TO_THIRD.contains(&call) {
        Doing::Transfers { target: third }
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
        let there = Place { descriptor: 3, offset: None, ignores_append: false };
        let placed = Place { offset: Some(0), ..there };
        assert_eq!(at("1", "0x7ffd 0x7f12"), Some(Doing::Writes(100, there)));
        assert_eq!(at("18", "0x7ffd 0x7f12"), Some(Doing::Writes(100, placed)));
        let vectors = |place| Some(Doing::WritesVectors { address: 0x5578, count: 100, place });
        assert_eq!(at("20", "0x7ffd 0x7f12"), vectors(there));
        assert_eq!(at("328", "0x7ffd 0x7f12"), vectors(placed));
        let whole = |words: &str| parse(format!("328 0x3 0x5578 0x64 {words} 0x7ffd 0x7f12\n").as_bytes());
        assert_eq!(whole("0xffffffffffffffff 0x0 0x0"), vectors(there));
        assert_eq!(whole("0x1000 0x0 0x2"), vectors(Place { offset: Some(4096), ..there }));
        // With RWF_APPEND, at the end.
        assert_eq!(whole("0x1000 0x0 0x10"), vectors(Place { descriptor: u64::MAX, offset: Some(4096), ..there }));
        // With RWF_NOAPPEND, there in any case.
        assert_eq!(whole("0x1000 0x0 0x20"), vectors(Place { offset: Some(4096), ignores_append: true, ..there }));
        assert_eq!(at("8", "0x7ffd 0x7f12"), Some(Doing::Reads));
        // execve, execveat, and those of x32 and 32-bit processes, whose reads are close, sched_getscheduler and
        // nfsservctl here.
        for call in ["59", "322", "1073742344", "1073742369", "11", "358", "3", "145", "180", "333", "378"] {
            assert_eq!(at(call, "0x7ffd 0x7f12"), Some(Doing::Reads), "{call}");
        }
        // Writes of 32-bit processes.
        assert_eq!(at("4", "0x7ffd 0x7f12"), Some(Doing::Writes(100, there)));
        for call in ["146", "181", "334", "379"] {
            assert_eq!(at(call, "0x7ffd 0x7f12"), Some(Doing::WritesUnmeasured), "{call}");
        }
        // sendfile, splice, copy_file_range.
        assert_eq!(at("40", "0x7ffd 0x7f12"), Some(Doing::Transfers { target: 3 }));
        assert_eq!(at("275", "0x7ffd 0x7f12"), Some(Doing::Transfers { target: 100 }));
        assert_eq!(at("326", "0x7ffd 0x7f12"), Some(Doing::Transfers { target: 100 }));
        // io_uring_enter, io_submit; a thread of the kernel; one that works for io_uring; between two calls; a 32-bit
        // number on 64 bits.
        assert_eq!(at("426", "0x7ffd 0x7f12"), Some(Doing::Unknown));
        assert_eq!(at("209", "0x7ffd 0x7f12"), Some(Doing::Unknown));
        assert_eq!(at("0", "0x0 0x0"), Some(Doing::Unknown));
        assert_eq!(at("1", "0x0 0x7f12"), Some(Doing::Unknown));
        assert_eq!(parse(b"-1 0x7ffd 0x7f12\n"), Some(Doing::Unknown));
        assert_eq!(at("1073741825", "0x7ffd 0x7f12"), Some(Doing::Unknown));
        assert_eq!(parse(b""), Some(Doing::Unknown));
        assert_eq!(parse(b"running\n"), None);
    }

    #[test]
    fn a_place_is_that_of_the_call_or_of_the_open_file() {
        use std::{io::Write, os::fd::AsRawFd};
        let place = |file: &File, offset| Place {
            descriptor: file.as_raw_fd().cast_unsigned().into(),
            offset,
            ignores_append: false,
        };
        let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        let there = std::env::temp_dir().join(format!("nacre-place-{}", std::process::id()));
        let mut file = File::create(&there).unwrap();
        file.write_all(b"seven..").unwrap();
        assert_eq!(offset(tid, place(&file, None)), Some(7));
        assert_eq!(offset(tid, place(&file, Some(3))), Some(3));
        let appends = File::options().append(true).open(&there).unwrap();
        assert_eq!(offset(tid, place(&appends, Some(3))), None);
        assert_eq!(offset(tid, Place { ignores_append: true, ..place(&appends, Some(3)) }), Some(3));
        assert_eq!(offset(tid, Place { descriptor: u64::MAX, ..place(&file, Some(3)) }), None);
        std::fs::remove_file(there).unwrap();
    }

    #[test]
    fn a_thread_that_is_gone_is_unknown() {
        assert_eq!(doing(0), Doing::Unknown);
        assert_eq!(ahead(u32::MAX, true, || None), Ahead::Unknown);
        assert_eq!(Ahead::Unknown.possible_write(), Some(WriteAhead::default()));
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
        assert_eq!(ahead(tid, true, || None), Ahead::Reads);
        drop(writer);
        assert_eq!(waiting.join().unwrap(), 0);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_copy_writes_to_its_target_and_reads_all_other_files() {
        use std::os::unix::fs::MetadataExt;
        // From an empty pipe: the thread waits there.
        let (reader, writer) = std::io::pipe().unwrap();
        let target = tempfile::tempfile().unwrap();
        let number = target.metadata().unwrap().ino();
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid()).unwrap();
            rustix::pipe::splice(&reader, None, &target, None, 10, rustix::pipe::SpliceFlags::empty()).unwrap()
        });
        let tid = receiver.recv().unwrap().as_raw_nonzero().get().cast_unsigned();
        while !matches!(doing(tid), Doing::Transfers { .. }) {
            std::thread::yield_now();
        }
        assert_eq!(ahead(tid, true, || Some(number)), Ahead::Writes(WriteAhead::default()));
        assert_eq!(ahead(tid, true, || Some(number + 1)), Ahead::Reads);
        assert_eq!(ahead(tid, true, || None), Ahead::Unknown);
        drop(writer);
        assert_eq!(waiting.join().unwrap(), 0);
    }
}
