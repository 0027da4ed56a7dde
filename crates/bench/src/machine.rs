//! The machine that the numbers belong to: kernel, processor, memory, file system, versions. Read from /proc and
//! from the programs.

use std::fs;
use std::path::Path;
use std::thread;

use crate::clock;
use crate::failure::Failure;
use crate::mounts;
use crate::options::{Plan, Source};
use crate::programs;
use crate::report::Machine;
use crate::transport;

/// Describes this machine for the report.
pub fn describe(plan: &Plan, source: &Path) -> Result<Machine, Failure> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let filesystem = match &plan.source {
        Source::Image { bytes, .. } => {
            let kind = mounts::of(source)?.map_or_else(String::new, |line| line.kind);
            let below = mounts::of(&plan.scratch)?.map_or_else(String::new, |line| storage(&line));
            format!("{kind} on a loop device of {} MiB, the image on {below}", bytes >> 20)
        }
        Source::Directory(_) | Source::Scratch => mounts::of(source)?.map_or_else(String::new, |line| storage(&line)),
    };
    Ok(Machine {
        kernel: format!("{} {}", read("/proc/sys/kernel/osrelease").trim(), std::env::consts::ARCH),
        cpu: processor(&read("/proc/cpuinfo")),
        cores: thread::available_parallelism().map_or(1, std::num::NonZero::get),
        memory: memory(&read("/proc/meminfo")),
        filesystem,
        load: read("/proc/loadavg").split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0),
        fuse_over_io_uring: transport::uring_is_on(),
        programs: versions(plan),
    })
}

/// Describes a file system and its device; for memory with a remark, because syncs cost nothing there.
fn storage(line: &mounts::MountLine) -> String {
    match line.kind.as_str() {
        "tmpfs" | "ramfs" => format!("{} (memory: syncs cost nothing)", line.kind),
        kind => format!("{kind} on {}", line.device),
    }
}

fn versions(plan: &Plan) -> Vec<(String, String)> {
    let mut versions = vec![("nacre".to_owned(), nacre_version(plan))];
    for (name, flag) in plan.table.programs {
        let version =
            programs::find(name).map_or_else(|| "not installed".to_owned(), |path| programs::version(&path, flag));
        versions.push(((*name).to_owned(), version));
    }
    versions
}

fn nacre_version(plan: &Plan) -> String {
    let measured = plan.targets.iter().flat_map(|target| target.steps).any(|step| step.programs().contains(&"nacre"));
    if measured { programs::version(&plan.nacre, "--version") } else { "not measured".to_owned() }
}

fn processor(cpuinfo: &str) -> String {
    let model = cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory(meminfo: &str) -> u64 {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"));
    line.and_then(|line| line.split_whitespace().nth(1))
        .and_then(|word| word.parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

/// The present moment in UTC as `YYYY-MM-DD HH:MM`.
pub fn now() -> String {
    let seconds = clock::since_epoch().as_secs();
    calendar(seconds)
}

/// Proleptic Gregorian date of a number of seconds since 1970, counted in 400-year eras that start
/// in March.
fn calendar(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}", rest / 3600, rest % 3600 / 60)
}

/// Whether the machine was busy when the run started, so that small differences are meaningless.
pub fn busy(machine: &Machine) -> bool {
    machine.load > 0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(calendar(0), "1970-01-01 00:00");
        assert_eq!(calendar(951_782_400), "2000-02-29 00:00");
        assert_eq!(calendar(951_868_800), "2000-03-01 00:00");
        assert_eq!(calendar(1_795_132_799), "2026-11-19 23:59");
        assert_eq!(calendar(4_107_542_400), "2100-03-01 00:00");
    }

    #[test]
    fn memory_is_told_from_disks() {
        let line =
            |kind: &str| mounts::MountLine { point: "/x".into(), kind: kind.to_owned(), device: "/dev/vda".to_owned() };
        assert_eq!(storage(&line("ext4")), "ext4 on /dev/vda");
        assert!(storage(&line("tmpfs")).contains("memory"));
    }

    #[test]
    fn proc_texts() {
        assert_eq!(processor("processor : 0\nmodel name\t: Example 9000\n"), "Example 9000");
        assert_eq!(memory("MemTotal:       1024 kB\nMemFree: 1 kB\n"), 1 << 20);
        assert_eq!(memory(""), 0);
    }
}
