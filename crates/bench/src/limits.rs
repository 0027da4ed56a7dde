//! Limits on the throughput of devices, by the io controller of the root control group, and a check that they hold.
//!
//! Called by `mounted` and `undo`; needs root and a kernel with that controller (version 1: only there does the
//! root group have limits, so that they apply to all writers, including kernel threads).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

use crate::clock;
use crate::failure::{Doing, Failure};
use crate::workload::{Buffer, open};

/// Directory with the controller's limits.
const CONTROLLER: &str = "/sys/fs/cgroup/blkio";
/// Amount of a check, in seconds of the limit: the kernel lets the traffic of a fraction of a second through before
/// it counts.
const PROOF: u64 = 2;
/// Size of one request in bytes.
const REQUEST: u64 = 1 << 20;
/// A device may be faster than its limit by this factor.
const FASTER: f64 = 1.15;
/// A device may be slower than its limit by this factor.
const SLOWER: f64 = 0.7;

fn file(operation: &str) -> PathBuf {
    Path::new(CONTROLLER).join(format!("blkio.throttle.{operation}_bps_device"))
}

/// Whether devices can be limited here.
pub fn are_there() -> bool {
    ["read", "write"].iter().all(|operation| file(operation).exists())
}

/// Limits reads and writes of a device, each to this many bytes a second; 0: no limit.
pub fn set(device: &Path, bytes: u64) -> Result<(), Failure> {
    let number = fs::metadata(device).doing("looking at", device)?.rdev();
    let line = format!("{}:{} {bytes}", rustix::fs::major(number), rustix::fs::minor(number));
    ["read", "write"].iter().try_for_each(|operation| {
        let file = file(operation);
        fs::write(&file, &line).doing("setting a limit in", &file)
    })
}

fn transfer(device: &Path, bytes: u64, write: bool) -> Result<Duration, Failure> {
    let mut buffer = Buffer::new(REQUEST as usize);
    let flags = OFlags::DIRECT | if write { OFlags::RDWR } else { OFlags::RDONLY };
    let file = open(device, flags)?;
    let failed = |error: rustix::io::Errno| Failure::io("measuring", device, error);
    let start = clock::now();
    for at in (0..bytes).step_by(REQUEST as usize) {
        let record = buffer.record(REQUEST);
        let count = match write {
            true => rustix::io::pwrite(&file, record, at).map_err(failed)?,
            false => rustix::io::pread(&file, record, at).map_err(failed)?,
        };
        if count as u64 != REQUEST {
            return Err(Failure::new(format!("{} has fewer than {bytes} bytes", device.display())));
        }
    }
    Ok(start.elapsed())
}

/// Returns how long it takes to read this many bytes of each device concurrently.
pub fn read(devices: &[PathBuf], bytes: u64) -> Result<Duration, Failure> {
    let start = clock::now();
    thread::scope(|scope| {
        let readers: Vec<_> =
            devices.iter().map(|device| scope.spawn(move || transfer(device, bytes, false))).collect();
        readers.into_iter().try_for_each(|reader| match reader.join() {
            Ok(read) => read.map(drop),
            Err(_) => Err(Failure::new("a reader panicked")),
        })
    })?;
    Ok(start.elapsed())
}

/// Checks the limits: writes and reads each of the devices, which are still empty, concurrently.
///
/// A device that is much faster or slower than its limit is a failure: measurements on it would be meaningless.
pub fn prove(devices: &[PathBuf], limit: u64) -> Result<(), Failure> {
    let one = |device: &Path| {
        for (doing, write) in [("writes", true), ("reads", false)] {
            let bytes = (limit * PROOF).next_multiple_of(REQUEST);
            let rate = bytes as f64 / transfer(device, bytes, write)?.as_secs_f64();
            let share = rate / limit as f64;
            if !(SLOWER..=FASTER).contains(&share) {
                return Err(Failure::new(format!(
                    "{} {doing} {:.0} MB/s where its limit is {:.0}",
                    device.display(),
                    rate / 1e6,
                    limit as f64 / 1e6
                )));
            }
        }
        Ok(())
    };
    let one = &one;
    thread::scope(|scope| {
        let provers: Vec<_> = devices.iter().map(|device| scope.spawn(move || one(device))).collect();
        provers.into_iter().try_for_each(|prover| match prover.join() {
            Ok(proof) => proof,
            Err(_) => Err(Failure::new("a proof panicked")),
        })
    })
}
