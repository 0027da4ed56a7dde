//! Amounts of work of each test: the usual ones, those of `--quick` and `--full`, and the options that change them.
//!
//! `options` calls [`scale`]; the options themselves are in the crate `nacre-bench-arguments`, where a table names
//! its options.

use clap::ArgMatches;

use crate::failure::Failure;
use crate::report::Point;
use crate::table::Table;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;
/// iozone skips records below this size for files above [`SMALL_RECORD_FILES`]: they would dominate the run.
const SMALL_RECORDS: u64 = 64 * KIB;
const SMALL_RECORD_FILES: u64 = 32 * MIB;
/// Size of cages where there is [`PLENTY`] of room, [`TIGHT_CAGE`] elsewhere: large enough for unrestricted
/// write-back, and a fully allocated image leaves enough room for everything else.
const CAGE: u64 = 10 * GIB;
const PLENTY: u64 = 30 * GIB;
const TIGHT_CAGE: u64 = 4 * GIB;
/// Number of names in a documented large archive on one disk.
const DOCUMENTED_NAMES: u64 = 1_382_438;
/// Documented number of files, and of directories, in one directory that caused trouble.
const DOCUMENTED_FILES: u64 = 1_644_553;
const DOCUMENTED_DIRECTORIES: u64 = 1_100_000;
/// Smallest image in which every file system can be made.
const SMALLEST_IMAGE: u64 = 512 * MIB;
/// Smallest files of bonnie++ and of overwrites; their sizes are multiples of it.
const WHOLE: u64 = 8 * MIB;
/// Names have six characters.
const MOST_NAMES: u64 = 50_000_000;
/// Smallest size of a cage with a file system of its own.
const SMALLEST_CAGE: u64 = 320 * MIB;

/// Amounts of work of each test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scale {
    /// Rounds; each target is measured once a round.
    pub rounds: u32,
    /// Points of iozone's automatic mode.
    pub points: Vec<Point>,
    /// Bytes of the page-cache file.
    pub cache: u64,
    /// Number of small files.
    pub files: u64,
    /// Number of files in the big directory.
    pub listing: u64,
    /// Number of files in the source tree.
    pub tree: u64,
    /// Number of blocks of 1 MiB that dd writes.
    pub dd: u64,
    /// Number of lines appended; a tenth of it for short lines appended by a shell.
    pub appends: u64,
    /// Size of the cages.
    pub cage: u64,
    /// Size of the cages that are filled.
    pub fill: u64,
    /// Number of names of the directory on two branches.
    pub names: u64,
    /// Size of the large file that is copied up.
    pub copy: u64,
    /// Size of images with file systems.
    pub image: u64,
    /// Size of bonnie++'s file.
    pub size: u64,
    /// Size of the files that are written and read as a whole.
    pub stream: u64,
    /// Size of the file that is overwritten in small blocks.
    pub overwrite: u64,
    /// Number of appends that are synced one by one.
    pub fsyncs: u64,
    /// Number of snapshots that exist when the file is overwritten again.
    pub snapshots: u64,
    /// Number of directories in one directory.
    pub directories: u64,
    /// Seconds for which each load of random overwrites is written.
    pub seconds: u64,
    /// Whether the sizes of many files are 50 to 500 KB instead of 100 bytes.
    pub mixed: bool,
    /// Whether to wait until a pool in a bucket is idle.
    pub rests: bool,
}

impl Scale {
    /// Describes the amounts of a table, for users.
    pub fn describe(&self, table: &Table) -> String {
        let shown = |id: &str| {
            Some(match id {
                "files" => format!("{} small files", self.files),
                "listing" => format!("{} files in the big directory", self.listing),
                "tree" => format!("{} in the tree", self.tree),
                "cache" => format!("page-cache file of {} MiB", self.cache >> 20),
                "dd" => format!("dd of {} MiB", self.dd),
                "appends" => format!("{} lines (short ones by the shell: {})", self.appends, self.shell_short()),
                "cage" => format!("cages of {} MiB", self.cage >> 20),
                "names" => format!("{} names over two branches", self.names),
                "copy" => format!("copy-up of {} MiB", self.copy >> 20),
                "image" => format!("images of {} MiB", self.image >> 20),
                "size" => format!("bonnie++'s file of {} MiB", self.size >> 20),
                "stream" => format!("files of {} MiB", self.stream >> 20),
                "overwrite" => format!("{} MiB overwritten", self.overwrite >> 20),
                "fsyncs" => format!("{} syncs", self.fsyncs),
                "snapshots" => format!("{} snapshots", self.snapshots),
                "directories" => format!("{} directories in one", self.directories),
                "seconds" => format!("{} seconds for each load", self.seconds),
                "mix" if self.mixed => "files of 50 to 500 KB".to_owned(),
                "mix" => "files of 100 bytes".to_owned(),
                "fill" => format!("{} MiB where they are filled", self.fill >> 20),
                _ => return None,
            })
        };
        table.arguments.amounts.iter().filter_map(|id| shown(id)).collect::<Vec<String>>().join(", ")
    }

    /// Returns the number of names that a new file system of a target's own must be able to hold.
    pub fn names_in_one(&self) -> u64 {
        self.files.max(self.directories)
    }

    /// Returns the number of short lines that a shell appends.
    pub fn shell_short(&self) -> u64 {
        self.appends.div_ceil(10)
    }
}

/// Returns the requested amounts, with cages that fit into the free bytes of their file system.
pub fn scale(table: &Table, matches: &ArgMatches, free: u64) -> Result<Scale, Failure> {
    // A table does not have the options of other tables.
    let flag = |id: &str| matches.try_get_one::<bool>(id).ok().flatten().copied().unwrap_or(false);
    let list = |id: &str| -> Vec<u64> {
        matches.try_get_many::<u64>(id).ok().flatten().into_iter().flatten().copied().collect()
    };
    let number = |id: &str| matches.try_get_one::<u64>(id).ok().flatten().copied();
    let mut scale = if flag("quick") { quick_scale() } else { usual_scale() };
    if table.arguments.amounts.contains(&"directories") {
        scale.files = match (flag("full"), flag("quick")) {
            (true, _) => DOCUMENTED_FILES,
            (_, true) => 10_000,
            _ => 200_000,
        };
    }
    if table.arguments.name == "object" {
        (scale.files, scale.fsyncs) = (10_000, 200);
        if flag("quick") {
            // With a round trip of 50 ms, some file systems need a twentieth of a second and more for each file.
            (scale.rounds, scale.files, scale.tree, scale.fsyncs, scale.stream) = (1, 200, 64, 40, 16 * MIB);
        }
    }
    if table.arguments.name == "object" && flag("full") {
        (scale.files, scale.rests) = (DOCUMENTED_FILES, true);
    }
    if table.arguments.name == "aged" {
        (scale.rounds, scale.image) = (1, 4 * GIB);
        if flag("full") {
            scale.seconds = 600;
        }
        if flag("quick") {
            (scale.image, scale.seconds) = (GIB, 3);
        }
    }
    scale.mixed = flag("mix");
    if flag("full") {
        scale.directories = DOCUMENTED_DIRECTORIES;
        scale.points = points(&doubling(64 * KIB, 512 * MIB), &doubling(4 * KIB, 16 * MIB), true);
        scale.names = DOCUMENTED_NAMES;
    }
    scale.cage = if free >= PLENTY { CAGE } else { TIGHT_CAGE };
    let (sizes, records) = (list("sizes"), list("records"));
    if !sizes.is_empty() || !records.is_empty() {
        let sizes = if sizes.is_empty() { vec![MIB, 16 * MIB] } else { sizes };
        let records = if records.is_empty() { vec![4 * KIB, 64 * KIB, MIB] } else { records };
        scale.points = points(&sizes, &records, false);
        if scale.points.is_empty() {
            return Err(Failure::usage("no record size divides a file size"));
        }
    }
    if let Some(rounds) = number("rounds") {
        scale.rounds = u32::try_from(rounds).map_err(|_| Failure::usage("too many rounds"))?;
    }
    for (id, amount) in [
        ("cache", &mut scale.cache),
        ("files", &mut scale.files),
        ("listing", &mut scale.listing),
        ("tree", &mut scale.tree),
        ("dd", &mut scale.dd),
        ("appends", &mut scale.appends),
        ("cage", &mut scale.cage),
        ("fill", &mut scale.fill),
        ("names", &mut scale.names),
        ("copy", &mut scale.copy),
        ("image", &mut scale.image),
        ("size", &mut scale.size),
        ("stream", &mut scale.stream),
        ("overwrite", &mut scale.overwrite),
        ("fsyncs", &mut scale.fsyncs),
        ("snapshots", &mut scale.snapshots),
        ("directories", &mut scale.directories),
        ("seconds", &mut scale.seconds),
    ] {
        *amount = number(id).unwrap_or(*amount);
    }
    check(&scale)?;
    Ok(scale)
}

fn check(scale: &Scale) -> Result<(), Failure> {
    if scale.cache < MIB || !scale.cache.is_multiple_of(MIB) {
        return Err(Failure::usage("--cache must be a multiple of 1M"));
    }
    if scale.copy < MIB || !scale.copy.is_multiple_of(MIB) {
        return Err(Failure::usage("--copy must be a multiple of 1M"));
    }
    if scale.names > MOST_NAMES {
        return Err(Failure::usage(format!("--names must be at most {MOST_NAMES}")));
    }
    for (id, bytes) in [("size", scale.size), ("stream", scale.stream), ("overwrite", scale.overwrite)] {
        if bytes < WHOLE || !bytes.is_multiple_of(WHOLE) {
            return Err(Failure::usage(format!("--{id} must be a multiple of {}M", WHOLE / MIB)));
        }
    }
    if scale.image < SMALLEST_IMAGE || !scale.image.is_multiple_of(MIB) {
        return Err(Failure::usage(format!("--image must be a multiple of 1M and at least {}M", SMALLEST_IMAGE / MIB)));
    }
    for (id, bytes) in [("cage", scale.cage), ("fill", scale.fill)] {
        if bytes < SMALLEST_CAGE || !bytes.is_multiple_of(MIB) {
            return Err(Failure::usage(format!(
                "--{id} must be a multiple of 1M and at least {}M",
                SMALLEST_CAGE / MIB
            )));
        }
    }
    // The longest lines, an eighth for the file systems' own needs, and the warm files next to them.
    let needed = (scale.dd * MIB).max(scale.appends.saturating_mul(4 * KIB)).max(scale.cache.saturating_mul(2));
    if scale.cage / 8 * 7 < needed {
        return Err(Failure::usage(format!("--cage must be larger: the tests write up to {} MiB", needed / MIB)));
    }
    Ok(())
}

fn usual_scale() -> Scale {
    let sizes = [64 * KIB, MIB, 16 * MIB, 128 * MIB];
    Scale {
        rounds: 5,
        points: points(&sizes, &[4 * KIB, 64 * KIB, MIB, 16 * MIB], true),
        cache: 256 * MIB,
        files: 20_000,
        listing: 200_000,
        tree: 1_650,
        dd: 1000,
        appends: 100_000,
        cage: CAGE,
        fill: GIB,
        names: 300_000,
        copy: GIB,
        image: 24 * GIB,
        size: 2 * GIB,
        stream: 512 * MIB,
        overwrite: 512 * MIB,
        fsyncs: 1000,
        snapshots: 1000,
        directories: 100_000,
        seconds: 60,
        mixed: false,
        rests: false,
    }
}

fn quick_scale() -> Scale {
    let points = vec![Point { file: MIB, record: 4 * KIB }, Point { file: 16 * MIB, record: 64 * KIB }];
    Scale {
        rounds: 3,
        points,
        cache: 32 * MIB,
        files: 2_000,
        listing: 5_000,
        tree: 400,
        dd: 200,
        appends: 20_000,
        fill: 512 * MIB,
        names: 30_000,
        copy: 64 * MIB,
        size: 64 * MIB,
        stream: 64 * MIB,
        overwrite: 32 * MIB,
        fsyncs: 100,
        snapshots: 20,
        directories: 5_000,
        ..usual_scale()
    }
}

fn doubling(from: u64, to: u64) -> Vec<u64> {
    std::iter::successors(Some(from), |size| size.checked_mul(2)).take_while(|size| *size <= to).collect()
}

/// Returns every pair of a file size and a record size that divides it; `as_iozone` skips small records in big
/// files.
fn points(sizes: &[u64], records: &[u64], as_iozone: bool) -> Vec<Point> {
    let mut points = Vec::new();
    for file in sizes {
        for record in records {
            let dominated = as_iozone && *file > SMALL_RECORD_FILES && *record < SMALL_RECORDS;
            if record <= file && file.is_multiple_of(*record) && !dominated {
                points.push(Point { file: *file, record: *record });
            }
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{LOGS, MIRROR};

    #[test]
    fn full_mode_is_iozones() {
        let points = points(&doubling(64 * KIB, 512 * MIB), &doubling(4 * KIB, 16 * MIB), true);
        assert_eq!(points.first(), Some(&Point { file: 64 * KIB, record: 4 * KIB }));
        assert_eq!(points.last(), Some(&Point { file: 512 * MIB, record: 16 * MIB }));
        // Ten file sizes up to 32 MiB with 5 to 13 records, then four with the nine records from 64
        // KiB.
        assert_eq!(points.len(), (5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 13) + 4 * 9);
    }

    #[test]
    fn tables_have_their_own_amounts() {
        let of = |words: &[&str]| {
            let matches = nacre_bench_arguments::command()
                .try_get_matches_from([&["bench"], words].concat())
                .map_err(|error| error.to_string())?;
            let (name, matches) = matches.subcommand().unwrap();
            scale(crate::table::find(name).unwrap(), matches, PLENTY).map_err(|failure| failure.to_string())
        };
        assert_eq!(
            of(&["logs", "--dd", "3", "--appends", "15"]).map(|scale| (scale.dd, scale.shell_short())),
            Ok((3, 2))
        );
        assert_eq!(of(&["mirror", "--quick"]), Ok(quick_scale()));
        let matches = nacre_bench_arguments::command().try_get_matches_from(["bench", "logs"]).unwrap();
        assert_eq!(scale(&LOGS, matches.subcommand().unwrap().1, PLENTY - 1).map(|scale| scale.cage), Ok(TIGHT_CAGE));
        assert!(of(&["mirror", "--dd", "3"]).is_err() && of(&["logs", "--listing", "3"]).is_err());
        assert_eq!(of(&["union", "--full"]).map(|scale| scale.names), Ok(1_382_438));
        assert_eq!(
            of(&["listing", "--full"]).map(|scale| (scale.files, scale.directories)),
            Ok((1_644_553, 1_100_000))
        );
        assert_eq!(of(&["listing", "--full", "--files", "7"]).map(|scale| scale.files), Ok(7));
        assert!(
            of(&["pool", "--size", "1M"]).is_err()
                && of(&["pool", "--image", "1M"]).is_err()
                && of(&["pool", "--full"]).is_err()
        );
        let aged = |words: &[&str]| of(words).map(|scale| (scale.rounds, scale.image, scale.seconds));
        assert_eq!(aged(&["aged"]), Ok((1, 4 * GIB, 60)));
        assert_eq!(aged(&["aged", "--full", "--image", "8G"]), Ok((1, 8 * GIB, 600)));
        assert_eq!(aged(&["aged", "--quick", "--seconds", "2"]), Ok((1, GIB, 2)));
        assert!(of(&["union", "--copy", "1000"]).is_err() && of(&["union", "--names", "60000000"]).is_err());
        assert!(of(&["logs", "--cage", "1G", "--dd", "1000"]).unwrap_err().contains("larger"));
        assert!(of(&["logs", "--fill", "1M"]).unwrap_err().contains("at least"));
    }

    #[test]
    fn amounts_are_told() {
        let scale = quick_scale();
        assert_eq!(
            scale.describe(&MIRROR),
            "page-cache file of 32 MiB, 2000 small files, 5000 files in the big directory, 400 in the tree"
        );
        assert!(
            scale
                .describe(&LOGS)
                .starts_with("cages of 10240 MiB, dd of 200 MiB, 20000 lines (short ones by the shell: 2000)")
        );
    }
}
