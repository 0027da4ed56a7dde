//! The units that are installed (`packaging/systemd`), and the units and the lines of fstab that README
//! and docs show, judged by systemd-analyze(1), findmnt(8) and the program itself.
//!
//! A unit stands in a block ` ```ini ` that has `[Unit]` in it; its first line may name it (`#
//! .../NAME.service`). Lines of fstab stand in blocks ` ```fstab `. Nothing is mounted and nothing
//! is started. Where systemd or findmnt is not installed, its part is skipped
//! (`NACRE_TEST_REQUIRE=systemd,findmnt` forbids that).

use crate::mounting::{finish, nacre, needs, scratch, skip, text};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Where the documents have the program.
const PROGRAM: &str = "/usr/local/bin/nacre";
/// Where the units that are installed have it.
const INSTALLED: &str = "/usr/bin/nacre";
const GENERATOR: &str = "/lib/systemd/system-generators/systemd-fstab-generator";
/// Messages of findmnt for every file system that is not there while it is checked.
const EXPECTED: [&str; 3] =
    ["unreachable source: ", "seems unsupported by the current kernel", "cannot detect on-disk filesystem type"];

/// A fenced block of a document: where it begins, and its lines.
struct Block {
    place: String,
    lines: Vec<String>,
}

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = vec![root.join("README.md")];
    let mut directories = vec![root.join("docs")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => directories.push(path),
                Some(end) if end == "md" => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// All blocks with this word behind their fence.
fn blocks(language: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    for path in documents() {
        let page = fs::read_to_string(&path).unwrap();
        let mut inside = false;
        let mut fenced = false;
        for (index, line) in page.lines().enumerate() {
            if let Some(fence) = line.trim_start().strip_prefix("```") {
                fenced = !fenced;
                inside = fenced && fence.trim() == language;
                if inside {
                    found.push(Block {
                        place: format!("{}:{}", path.file_name().unwrap().to_string_lossy(), index + 1),
                        lines: Vec::new(),
                    });
                }
                continue;
            }
            if inside {
                found.last_mut().unwrap().lines.push(line.to_owned());
            }
            let of_fstab = line.contains("fuse.nacre") && line.trim_end_matches(['`', ' ']).ends_with(" 0 0");
            assert!(fenced || !of_fstab, "{}:{}: lines of fstab stand in blocks ```fstab", path.display(), index + 1);
        }
        assert!(!fenced, "{}: a block without an end", path.display());
    }
    found
}

/// The units, each with its name and its text.
fn units() -> Vec<(String, Block)> {
    let units: Vec<Block> =
        blocks("ini").into_iter().filter(|block| block.lines.iter().any(|line| line == "[Unit]")).collect();
    let name = |(index, block): (usize, Block)| {
        let named = block
            .lines
            .first()
            .and_then(|line| line.strip_prefix("# "))
            .and_then(|path| path.rsplit('/').next())
            .map(str::to_owned);
        (named.unwrap_or_else(|| format!("example-{index}.service")), block)
    };
    units.into_iter().enumerate().map(name).collect()
}

/// The lines of fstab, each with its place and its six columns.
fn lines() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for block in blocks("fstab") {
        for line in block.lines.iter().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let columns: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(columns.len(), 6, "{}: {line}", block.place);
            found.push((block.place.clone(), columns));
        }
    }
    found
}

fn is_there(program: &str, needed: &str) -> bool {
    let found = Command::new(program).arg("--version").output();
    found.is_ok_and(|output| output.status.success()) || skip(needed, &format!("{program} is not installed"))
}

fn said(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

/// Writes the units into a directory, with the program as it was built.
fn write_units(directory: &Path) -> Vec<String> {
    let program = nacre();
    let mut names = Vec::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd")).unwrap() {
        let path = entry.unwrap().path();
        let unit = fs::read_to_string(&path).unwrap().replace(INSTALLED, program.to_str().unwrap());
        for line in unit.lines().filter(|line| line.starts_with("Exec")) {
            assert!(line.contains(program.to_str().unwrap()), "{}: the program is {INSTALLED}: {line}", path.display());
        }
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        fs::write(directory.join(&name), unit).unwrap();
        names.push(name);
    }
    for (name, block) in units() {
        let unit = block.lines.join("\n").replace(PROGRAM, program.to_str().unwrap());
        for line in unit.lines().filter(|line| line.starts_with("Exec")) {
            assert!(line.contains(program.to_str().unwrap()), "{}: the program is {PROGRAM}: {line}", block.place);
            // systemd replaces what stands behind a single one, and says nothing.
            let rest = line.replace("$$", "").replace("%%", "");
            assert!(
                !rest.contains(['$', '%']),
                "{}: in a unit, $ is written $$ and % is written %%: {line}",
                block.place
            );
        }
        fs::write(directory.join(&name), unit).unwrap();
        assert!(!names.contains(&name), "{}: {name} is there twice", block.place);
        names.push(name);
    }
    names
}

#[test]
fn systemd_takes_the_units() {
    needs!(is_there("systemd-analyze", "systemd"));
    let place = scratch();
    let names = write_units(place.path());
    assert!(names.len() >= 9, "{names:?}");
    for name in names {
        let mut verify = Command::new("systemd-analyze");
        let output = finish(
            verify.args(["verify", "--man=no"]).arg(place.path().join(&name)).env("SYSTEMD_LOG_LEVEL", "warning"),
        );
        let said = said(&output);
        // Of a template, an instance is judged.
        let begin = name.split_inclusive('@').next().unwrap();
        let about: Vec<&str> = said.lines().filter(|line| line.contains(begin)).collect();
        assert!(output.status.success() && about.is_empty(), "{name}: {}\n{said}", output.status);
    }
}

#[test]
fn findmnt_and_the_program_take_the_lines_of_fstab() {
    let lines = lines();
    assert!(lines.len() >= 5, "{} lines of fstab", lines.len());
    let verifies = is_there("findmnt", "findmnt");
    let place = scratch();
    let mount = place.path().join("mount.fuse.nacre");
    symlink(nacre(), &mount).unwrap();
    for (index, (at, columns)) in lines.iter().enumerate() {
        let [source, _, kind, words, ..] = &columns[..] else { panic!("{at}: {columns:?}") };
        assert_eq!(kind, "fuse.nacre", "{at}");
        // What mount(8) would run, but for the mount itself.
        let target = place.path().join(format!("m{index}"));
        fs::create_dir(&target).unwrap();
        let mut helper = Command::new(&mount);
        let output = finish(
            helper
                .arg(source)
                .arg(&target)
                .args(["-f", "-o", words])
                .env("NACRE_STATE_DIR", place.path().join("state")),
        );
        assert!(output.status.success(), "{at}: {columns:?}: {}", said(&output));
        if !verifies {
            continue;
        }
        let table = place.path().join("fstab");
        let mut columns = columns.clone();
        columns[1] = target.to_str().unwrap().to_owned();
        fs::write(&table, columns.join(" ") + "\n").unwrap();
        let output = finish(Command::new("findmnt").args(["--verify", "--tab-file"]).arg(&table).env("LC_ALL", "C"));
        let said = said(&output);
        let complains = |line: &&str| {
            line.trim_start().starts_with('[') && !EXPECTED.iter().any(|expected| line.contains(expected))
        };
        let wrong: Vec<&str> = said.lines().filter(complains).collect();
        assert!(output.status.success() && wrong.is_empty(), "{at}: {columns:?}: {}\n{said}", output.status);
    }
}

/// systemd makes units of the lines; they and the documented ones together make an order without a
/// circle.
#[test]
fn systemd_finds_an_order_for_the_lines_of_fstab() {
    needs!(is_there("systemd-analyze", "systemd"));
    if !Path::new(GENERATOR).exists() {
        skip("systemd", &format!("{GENERATOR} is not there"));
        return;
    }
    for (at, mut columns) in lines() {
        let place = scratch();
        write_units(place.path());
        let table = place.path().join("fstab");
        columns[1] = "/nacre-test-mount".to_owned();
        fs::write(&table, columns.join(" ") + "\n").unwrap();
        let output = finish(Command::new(GENERATOR).args([place.path(); 3]).env("SYSTEMD_FSTAB", &table));
        assert!(output.status.success(), "{at}: {}", said(&output));
        let unit = place.path().join("nacre\\x2dtest\\x2dmount.mount");
        assert!(unit.exists(), "{at}: {columns:?}: systemd makes no unit of it: {}", said(&output));
        let path = format!("{}:", place.path().display());
        let mut verify = Command::new("systemd-analyze");
        let output = finish(verify.args(["verify", "--man=no"]).arg(&unit).env("SYSTEMD_UNIT_PATH", path));
        let said = said(&output);
        assert!(
            output.status.success() && !said.contains("cycle") && !said.contains("nacre"),
            "{at}: {columns:?}: {said}"
        );
    }
}
