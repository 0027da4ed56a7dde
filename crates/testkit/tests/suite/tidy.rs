//! The house rules that a program can check, as tests: each failure names the file, the line and
//! what to do.
//!
//! Callers: `cargo test`. The tree is read from disk, so that a file nobody compiles is checked
//! too.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

#[path = "tidy/libraries.rs"]
mod libraries;
#[path = "tidy/modules.rs"]
mod modules;

const SOFT_LINES: usize = 600;
const HARD_LINES: usize = 1000;

/// Names that say nothing about what a thing is.
const EMPTY_NAMES: &[&str] = &["util", "utils", "manager", "helper", "helpers", "common", "misc"];

/// The crates that may contain `unsafe`.
const UNSAFE_CRATES: &[&str] = &["sys", "fusewire"];

/// Crate edges are the architecture: for each package, which of our packages it may depend on; then
/// which more its tests may.
const EDGES: &[(&str, &[&str], &[&str])] = &[
    ("nacre-vfs", &[], &[]),
    ("nacre-sys", &[], &[]),
    ("nacre-size", &[], &[]),
    ("fusewire", &[], &[]),
    ("nacre-layers", &["nacre-vfs", "nacre-sys", "nacre-size"], &["nacre-testkit"]),
    ("nacre-cage", &["nacre-vfs", "nacre-sys", "nacre-layers"], &["nacre-testkit"]),
    ("nacre-stack", &["nacre-vfs", "nacre-layers", "nacre-cage", "nacre-union"], &["nacre-sys", "nacre-testkit"]),
    ("nacre-poolfs", &["nacre-vfs", "nacre-layers", "nacre-pool"], &["nacre-testkit"]),
    (
        "nacre-fuse",
        &["nacre-vfs", "nacre-sys", "fusewire"],
        &["nacre-layers", "nacre-pool", "nacre-poolfs", "nacre-stack", "nacre-testkit", "nacre-union"],
    ),
    ("nacre-union", &["nacre-vfs", "nacre-sys", "nacre-size"], &["nacre-layers", "nacre-testkit"]),
    ("nacre-pool", &["nacre-sys", "nacre-size"], &[]),
    ("nacre-remote", &["nacre-pool"], &[]),
    ("nacre-admin", &["nacre-pool", "nacre-remote"], &[]),
    ("nacre-bench-arguments", &[], &[]),
    ("nacre-bench", &["nacre-bench-arguments"], &[]),
    ("nacre-copy", &["nacre-sys"], &[]),
    // The program that holds data links none of its libraries.
    ("nacre-volumes", &["nacre-sys", "nacre-size"], &["nacre-testkit"]),
    ("nacre-workspace", &["nacre-sys", "nacre-union"], &["nacre-vfs", "nacre-layers", "nacre-fuse", "nacre-testkit"]),
    (
        "nacre-fuzz",
        &[
            "nacre-vfs",
            "nacre-layers",
            "nacre-cage",
            "nacre-stack",
            "nacre-union",
            "nacre-pool",
            "nacre-admin",
            "nacre-daemon",
            "fusewire",
        ],
        &[],
    ),
    ("nacre-testkit", &["nacre-vfs"], &[]),
    (
        "nacre-daemon",
        &[
            "nacre-vfs",
            "nacre-sys",
            "nacre-layers",
            "nacre-cage",
            "nacre-stack",
            "nacre-poolfs",
            "nacre-union",
            "nacre-pool",
            "nacre-admin",
            "nacre-remote",
            "nacre-fuse",
            "fusewire",
        ],
        &[],
    ),
    (
        "nacre-cli",
        &[
            "nacre-sys",
            "nacre-layers",
            "nacre-stack",
            "nacre-union",
            "nacre-pool",
            "nacre-admin",
            "nacre-remote",
            "nacre-daemon",
            "fusewire",
            "nacre-bench-arguments",
            "nacre-copy",
            "nacre-workspace",
        ],
        &["nacre-testkit"],
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// All files below `directory` that belong to the project (no build products, no version control).
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            let product =
                name == ".git" || name == "target" || name == ".scratch" || path.ends_with("proptest-regressions");
            if !product {
                files(&path, found);
            }
        } else if kind.is_file() && path.extension().is_none_or(|suffix| suffix != "swp") {
            found.push(path);
        }
    }
}

/// Files of the project with their text, as (path from the root, text).
fn sources(suffixes: &[&str]) -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    files(&root, &mut found);
    let mut texts: Vec<(String, String)> = found
        .iter()
        .filter(|path| {
            path.extension().and_then(|suffix| suffix.to_str()).is_some_and(|suffix| suffixes.contains(&suffix))
        })
        .map(|path| (shown(&root, path), std::fs::read_to_string(path).unwrap()))
        .collect();
    texts.sort();
    assert!(!texts.is_empty(), "no files with {suffixes:?} below {}", root.display());
    texts
}

fn shown(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()
}

/// Collects complaints, so that one run shows all of them.
#[derive(Default)]
struct Complaints(String);

impl Complaints {
    fn add(&mut self, place: &str, line: usize, what: impl std::fmt::Display) {
        let _ =
            if line == 0 { writeln!(self.0, "{place}: {what}") } else { writeln!(self.0, "{place}:{line}: {what}") };
    }

    fn none(self) {
        assert!(self.0.is_empty(), "\n{}", self.0);
    }
}

#[test]
fn files_are_short() {
    let mut complaints = Complaints::default();
    for (path, text) in sources(&["rs", "md", "toml"]) {
        let lines = text.lines().count();
        if lines > HARD_LINES {
            complaints.add(&path, 0, format_args!("{lines} lines; {HARD_LINES} is the limit: split it"));
        } else if lines > SOFT_LINES && path.ends_with(".rs") {
            println!("note: {path} has {lines} lines ({SOFT_LINES} is the habit)");
        }
    }
    complaints.none();
}

#[test]
fn each_rust_file_opens_with_what_it_is() {
    let mut complaints = Complaints::default();
    for (path, text) in sources(&["rs"]) {
        let head = text.lines().next().unwrap_or("");
        let says = head.strip_prefix("//!").is_some_and(|rest| rest.trim().len() > 7);
        if !says {
            complaints.add(&path, 1, "the first line has to say what the file is (`//! ...`)");
        }
    }
    complaints.none();
}

/// The demo is run on machines whose owners want to look at nacre: nothing but what building and
/// mounting needs comes there.
#[test]
fn the_demo_installs_a_compiler_and_fuse_only() {
    use std::os::unix::fs::PermissionsExt;
    let demo = std::fs::read_to_string(root().join("scripts/demo")).unwrap();
    assert!(
        demo.lines().any(|line| line == "scripts/setup build"),
        "scripts/demo has scripts/setup install what the tests need"
    );
    // A machine where nothing is installed, an ordinary user, and a sudo that only says what it was
    // asked for.
    let machine = tempfile::tempdir().unwrap();
    for (name, script) in [
        ("dpkg-query", "exit 1"),
        ("id", "echo 1000"),
        // Nothing is built for this look.
        ("cargo-deb", "exit 0"),
        ("sudo", "echo \"asked: $*\" >&2; [ $1 != tee ] || cat >/dev/null"),
    ] {
        let path = machine.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", machine.path().display(), std::env::var("PATH").unwrap());
    let installs = |words: &[&str]| {
        let output = std::process::Command::new(root().join("scripts/setup"))
            .args(words)
            .env("PATH", &path)
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let line =
            said.lines().find(|line| line.contains("apt-get install")).unwrap_or_else(|| panic!("{said}")).to_owned();
        line.split_once("--no-install-recommends ").unwrap().1.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        installs(&["build"]),
        ["build-essential", "pkg-config", "fuse3", "util-linux", "ca-certificates", "git"]
    );
    let all = installs(&[]);
    for needed in ["bindfs", "systemd", "zfs-fuse"] {
        assert!(all.iter().any(|package| package == needed), "{all:?}");
    }
}

#[test]
fn names_say_what_a_thing_is() {
    let mut complaints = Complaints::default();
    for (path, text) in sources(&["rs"]) {
        for part in path.split('/') {
            let stem = part.strip_suffix(".rs").unwrap_or(part);
            if EMPTY_NAMES.contains(&stem) {
                complaints.add(&path, 0, format_args!("`{stem}` is no name"));
            }
        }
        for (index, line) in text.lines().enumerate() {
            if let Some(name) = defined_name(line)
                && names_nothing(name)
            {
                complaints.add(&path, index + 1, format_args!("`{name}` is no name"));
            }
        }
    }
    complaints.none();
}

fn defined_name(line: &str) -> Option<&str> {
    let code = line.split("//").next().unwrap_or("").split('"').next().unwrap_or("");
    let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    words.find(|word| ["struct", "enum", "trait", "mod", "type", "fn"].contains(word))?;
    words.next()
}

fn names_nothing(name: &str) -> bool {
    EMPTY_NAMES.contains(&name)
        || ["Manager", "Helper", "Helpers", "Util", "Utils", "Misc"].iter().any(|suffix| name.ends_with(suffix))
}

#[test]
fn names_are_judged_rightly() {
    assert_eq!(defined_name("pub(crate) struct InodeTable<T> {"), Some("InodeTable"));
    assert_eq!(defined_name("// a struct Manager"), None);
    assert!(
        names_nothing(concat!("Node", "Manager"))
            && names_nothing("misc")
            && !names_nothing("InodeTable")
            && !names_nothing("commons")
    );
}

#[test]
fn unsafe_code_lives_in_two_crates() {
    let mut complaints = Complaints::default();
    for (path, text) in sources(&["rs"]) {
        let Some(package) = path.strip_prefix("crates/").and_then(|rest| rest.split('/').next()) else { continue };
        if UNSAFE_CRATES.contains(&package) {
            continue;
        }
        let is_root = path.ends_with("/src/lib.rs") || path.ends_with("/src/main.rs");
        if is_root && !text.contains("#![forbid(unsafe_code)]") {
            complaints.add(&path, 0, "needs #![forbid(unsafe_code)]");
        }
        for (index, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            if ["{", "fn", "impl", "extern"].iter().any(|next| code.contains(&format!("unsafe {next}")))
                && !code.contains('"')
            {
                complaints.add(&path, index + 1, "unsafe belongs into crates/sys");
            }
        }
    }
    complaints.none();
}

#[test]
fn crate_edges_follow_the_design() {
    let mut complaints = Complaints::default();
    let mut seen = BTreeSet::new();
    for (path, text) in
        sources(&["toml"]).iter().filter(|(path, _)| path.starts_with("crates/") && path.ends_with("/Cargo.toml"))
    {
        let manifest: toml::Table = text.parse().unwrap();
        let package = manifest["package"]["name"].as_str().unwrap().to_owned();
        let Some((_, may, tests_may)) = EDGES.iter().find(|(name, _, _)| *name == package) else {
            complaints.add(
                path,
                0,
                format_args!("package `{package}` is not in the table of edges (crates/testkit/tests/suite/tidy.rs)"),
            );
            continue;
        };
        for (section, dependency) in dependencies(&manifest) {
            let ours = EDGES.iter().any(|(name, _, _)| *name == dependency);
            let allowed = may.contains(&dependency.as_str())
                || (section == "dev-dependencies" && tests_may.contains(&dependency.as_str()));
            if ours && !allowed {
                complaints.add(path, 0, format_args!("`{package}` must not depend on `{dependency}` ({section})"));
            }
        }
        seen.insert(package);
    }
    for (name, _, _) in EDGES {
        if !seen.contains(*name) {
            complaints.add("crates", 0, format_args!("package `{name}` is missing"));
        }
    }
    complaints.none();
}

/// Every dependency of a manifest with the kind of section that names it, also in
/// `[target.'...'.dependencies]`.
fn dependencies(manifest: &toml::Table) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let mut tables = vec![manifest];
    if let Some(targets) = manifest.get("target").and_then(toml::Value::as_table) {
        tables.extend(targets.values().filter_map(toml::Value::as_table));
    }
    for table in tables {
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (key, value) in table.get(section).and_then(toml::Value::as_table).into_iter().flatten() {
                let renamed = value.get("package").and_then(toml::Value::as_str);
                found.push((section, renamed.unwrap_or(key).to_owned()));
            }
        }
    }
    found
}

#[test]
fn sources_are_ascii_and_know_no_machine() {
    // Written in two halves so that this file passes.
    let places =
        [concat!("/wo", "rk/"), concat!("/tmp/br", "ief"), concat!("/ro", "ot/"), concat!("shared/ref", "erence")];
    let mut complaints = Complaints::default();
    let mut all = sources(&["rs", "md", "toml"]);
    let root = root();
    for script in ["scripts", ".ci"] {
        let mut found = Vec::new();
        files(&root.join(script), &mut found);
        all.extend(found.iter().map(|path| (shown(&root, path), std::fs::read_to_string(path).unwrap())));
    }
    for (path, text) in all {
        for (index, line) in text.lines().enumerate() {
            if !line.is_ascii() {
                complaints.add(&path, index + 1, "not ASCII");
            }
            for place in places {
                if line.contains(place) {
                    complaints.add(&path, index + 1, format_args!("names a place of one machine: {place}"));
                }
            }
            if names_an_issue(line) {
                complaints.add(&path, index + 1, "names an issue by number: say what it is about");
            }
        }
    }
    complaints.none();
}

fn names_an_issue(line: &str) -> bool {
    let lower = line.to_lowercase();
    lower.match_indices("issue ").any(|(at, found)| {
        let rest = &lower[at + found.len()..];
        rest.trim_start_matches('#').starts_with(|c: char| c.is_ascii_digit())
    })
}

/// The targets of the relative links of a Markdown text, without anchors.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let Some(target) = line[at + 2..].split(')').next() else { continue };
            let outside = target.contains("://") || target.starts_with("mailto:") || target.starts_with('#');
            if !outside {
                found.push((index + 1, target.split('#').next().unwrap_or(target).to_owned()));
            }
        }
    }
    found
}

/// Where a relative link from `page` leads, as a path from the root.
fn followed(page: &str, target: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts.join("/")
}

#[test]
fn links_in_documents_lead_somewhere_and_reach_every_document() {
    let root = root();
    let pages: BTreeMap<String, String> = sources(&["md"]).into_iter().collect();
    let mut complaints = Complaints::default();
    for (page, text) in &pages {
        for (line, target) in links(text) {
            if !root.join(followed(page, &target)).exists() {
                complaints.add(page, line, format_args!("the link to {target} leads nowhere"));
            }
        }
    }
    let mut reached: BTreeSet<String> = BTreeSet::new();
    let mut next: Vec<String> = vec!["README.md".to_owned(), "ARCHITECTURE.md".to_owned()];
    while let Some(page) = next.pop() {
        if let Some(text) = pages.get(&page)
            && reached.insert(page.clone())
        {
            next.extend(links(text).iter().map(|(_, target)| followed(&page, target)));
        }
    }
    for page in pages.keys().filter(|page| page.starts_with("docs/") && !reached.contains(*page)) {
        complaints.add(page, 0, "neither README.md nor ARCHITECTURE.md leads here");
    }
    complaints.none();
}

#[test]
fn links_are_read_rightly() {
    let text = "see [a](docs/a.md#top) and [b](https://b) [c](#c)\n```\n[no](no)\n```\n[d](../d.md)";
    assert_eq!(links(text), [(1, "docs/a.md".to_owned()), (5, "../d.md".to_owned())]);
    assert_eq!(followed("docs/commands/x.md", "../d.md"), "docs/d.md");
    assert!(names_an_issue(concat!("see iss", "ue #7")) && !names_an_issue("the issue is large"));
}

#[test]
fn the_changelog_has_a_place_for_what_is_new() {
    let text = std::fs::read_to_string(root().join("CHANGELOG.md")).unwrap();
    assert!(text.lines().any(|line| line == "## Unreleased"), "CHANGELOG.md needs a section `## Unreleased`");
}

#[test]
fn the_minimum_compiler_is_named_once_and_no_toolchain_is_pinned() {
    for name in ["rust-toolchain", "rust-toolchain.toml"] {
        assert!(
            !root().join(name).exists(),
            "{name} makes rustup download another toolchain; `rust-version` says what is needed"
        );
    }
    let mut complaints = Complaints::default();
    for (path, text) in
        sources(&["toml"]).iter().filter(|(path, _)| path.starts_with("crates/") && path.ends_with("/Cargo.toml"))
    {
        if !text.contains("rust-version.workspace = true") {
            complaints.add(path, 0, "take rust-version from the workspace");
        }
        if !text.contains("[lints]\nworkspace = true") {
            complaints.add(path, 0, "take the lints from the workspace");
        }
    }
    complaints.none();
}

#[test]
fn scripts_can_be_run() {
    use std::os::unix::fs::PermissionsExt;
    let root = root();
    let mut found = Vec::new();
    files(&root.join("scripts"), &mut found);
    found.push(root.join(".ci/run"));
    for path in found.iter().filter(|path| path.extension().is_none()) {
        let mode = std::fs::metadata(path).unwrap().permissions().mode();
        assert!(mode & 0o111 == 0o111, "{} is not executable", path.display());
    }
}
