//! Shared memory mappings, driven by fio: the bench itself has no `unsafe` code, which a mapping needs.
//!
//! The sum of the latencies of fio's accesses in nanoseconds is measured, because its run times are whole
//! milliseconds; it includes the page faults, which are the cost of a mapping.

use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::OFlags;
use serde_json::Value;

use super::{Visit, big_file};
use crate::failure::Failure;

const MIB: u64 = 1024 * 1024;

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (path, bytes) = (big_file::path(&visit.root), visit.scale.cache);
    let file = big_file::open(&path, OFlags::RDONLY)?;
    big_file::read_at(&file, visit.buffer.record(MIB), &big_file::forward(bytes, MIB))?;
    let mut command = Command::new("fio");
    command.args([
        "--ioengine=mmap",
        "--bs=64k",
        "--output-format=json",
        "--invalidate=0",
        "--fallocate=none",
        "--thread",
    ]);
    command.arg(format!("--size={bytes}")).arg(format!("--filename={}", path.display()));
    // One start of fio for both: each name begins a job, the second waits for the first.
    command.args(["--name=read", "--rw=read"]);
    if visit.reads_only {
        command.arg("--readonly");
    } else {
        command.args(["--name=write", "--rw=write", "--stonewall"]);
    }
    let output = command.current_dir("/").stdin(Stdio::null()).output();
    let output = output.map_err(|error| Failure::new(format!("starting fio: {error}")))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
        return Err(Failure::new(format!("fio failed: {text}")));
    }
    let incomplete = || Failure::new("fio's answer has no latencies, or it moved less than the file");
    visit.sample("mmap-read", parse(&output.stdout, 0, "read", bytes).ok_or_else(incomplete)?, bytes)?;
    if visit.reads_only {
        return Ok(());
    }
    visit.sample("mmap-write", parse(&output.stdout, 1, "write", bytes).ok_or_else(incomplete)?, bytes)?;
    big_file::flush(&file)
}

/// Returns the time that a job spent in its accesses, if it moved `bytes`.
fn parse(output: &[u8], job: usize, direction: &str, bytes: u64) -> Option<Duration> {
    // Notes may precede the object.
    let start = output.iter().position(|byte| *byte == b'{')?;
    let value: Value = serde_json::from_slice(output.get(start..)?).ok()?;
    let part = value.get("jobs")?.get(job)?.get(direction)?;
    if part.get("io_bytes")?.as_u64()? != bytes {
        return None;
    }
    let nanoseconds = part.get("clat_ns")?.get("mean")?.as_f64()? * part.get("total_ios")?.as_f64()?;
    Duration::try_from_secs_f64(nanoseconds / 1e9).ok().filter(|elapsed| !elapsed.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_is_read() {
        let text = br#"fio: a note
            {"jobs":[{"read":{"io_bytes":1024,"total_ios":2,"clat_ns":{"mean":1000.0}}},
                     {"write":{"io_bytes":1024,"total_ios":3,"clat_ns":{"mean":2000.0}}}]}"#;
        assert_eq!(parse(text, 0, "read", 1024), Some(Duration::from_nanos(2000)));
        assert_eq!(parse(text, 1, "write", 1024), Some(Duration::from_nanos(6000)));
        assert_eq!(parse(text, 0, "read", 2048), None, "moved less");
        assert_eq!(parse(text, 0, "write", 1024), None);
        assert_eq!(parse(text, 2, "write", 1024), None);
        assert_eq!(parse(b"nothing", 0, "read", 1024), None);
    }
}
