//! The examples in `README.md`, `docs/*.md` and `docs/commands/*.md` are executed: the shown output
//! has to be that of the program. Those of `docs/object-store.md` need moto, which scripts/setup
//! installs.
//!
//! The form is described in `docs/commands/README.md`: `$` commands (continued by `>`), `? N` the
//! exit code where it is not 0, then the output on both channels, with `[..]` for anything within a
//! line and `...` for any number of lines. The examples of a page run in one directory, one after
//! the other. `NACRE_TEST_PAGE=union` runs the pages with this in their names.

use crate::mounting::{as_root, finish, nacre, needs, scratch, skip, text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A command with its expected output.
#[derive(Debug, PartialEq, Eq)]
struct Example {
    line: usize,
    command: String,
    code: i32,
    output: Vec<String>,
}

/// The examples of a page.
fn examples(page: &str) -> Vec<Example> {
    let mut found: Vec<Example> = Vec::new();
    let mut inside = false;
    for (index, line) in page.lines().enumerate() {
        if let Some(fence) = line.strip_prefix("```") {
            inside = !inside && fence.trim().starts_with("console");
            continue;
        }
        if !inside {
            continue;
        }
        if let Some(command) = line.strip_prefix("$ ") {
            found.push(Example { line: index + 1, command: command.to_owned(), code: 0, output: Vec::new() });
            continue;
        }
        let last = found.last_mut().unwrap_or_else(|| panic!("line {}: output before any command", index + 1));
        match (line.strip_prefix("> ").or(if line == ">" { Some("") } else { None }), line.strip_prefix("? ")) {
            (Some(more), _) if last.output.is_empty() => last.command.push_str(&format!("\n{more}")),
            (_, Some(code)) if last.output.is_empty() => last.code = code.trim().parse().expect("an exit code"),
            _ => last.output.push(line.to_owned()),
        }
    }
    found
}

/// Returns whether a line matches a pattern.
fn line_fits(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split("[..]");
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    if parts.is_empty() {
        return rest.is_empty();
    }
    for (index, part) in parts.iter().enumerate() {
        if index + 1 == parts.len() {
            return rest.len() >= part.len() && rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// Returns whether an output matches a list of patterns.
fn fits(patterns: &[String], lines: &[&str]) -> bool {
    match patterns.split_first() {
        None => lines.is_empty(),
        Some((pattern, rest)) if pattern.trim() == "..." => {
            (0..=lines.len()).any(|skipped| fits(rest, &lines[skipped..]))
        }
        Some((pattern, rest)) => {
            lines.split_first().is_some_and(|(line, lines)| line_fits(pattern, line) && fits(rest, lines))
        }
    }
}

#[test]
fn patterns_are_understood() {
    let page = "text\n```console\n$ one\n> two\n? 3\nout [..] put\n...\nend\n```\n```sh\n$ not this\n```\n";
    let wanted = Example {
        line: 3,
        command: "one\ntwo".to_owned(),
        code: 3,
        output: ["out [..] put", "...", "end"].map(str::to_owned).to_vec(),
    };
    assert_eq!(examples(page), [wanted]);
    for (pattern, line, wanted) in [
        ("a", "a", true),
        ("a", "ab", false),
        ("a[..]", "abc", true),
        ("[..]c", "abc", true),
        ("a[..]x[..]c", "abxc", true),
        ("a[..]c", "ac", true),
        ("a[..]x", "abc", false),
    ] {
        assert_eq!(line_fits(pattern, line), wanted, "{pattern} {line}");
    }
    let list = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    assert!(fits(&list(&["a", "...", "d"]), &["a", "b", "c", "d"]));
    assert!(fits(&list(&["..."]), &[]));
    assert!(!fits(&list(&["a"]), &["a", "b"]));
}

/// Ends the server of S3 that a page has started, also where the page's own command for that did not run.
struct Server(PathBuf);

impl Drop for Server {
    fn drop(&mut self) {
        let Ok(number) = fs::read_to_string(self.0.join("moto.pid")) else { return };
        // Empty where the page stopped before it wrote the number.
        let Ok(number) = number.trim().parse::<i32>() else { return };
        // Other numbers would be those of groups of processes.
        if number > 0 {
            crate::mounting::kill(number.unsigned_abs(), rustix::process::Signal::TERM);
        }
    }
}

/// Runs the examples of one page; returns the mismatches.
fn run_page(path: &Path) -> Vec<String> {
    let place = scratch();
    let names = place.path().join(".programs");
    fs::create_dir(&names).unwrap();
    std::os::unix::fs::symlink(nacre(), names.join("nacre")).unwrap();
    let work = place.path().join("work");
    fs::create_dir(&work).unwrap();
    let _server = Server(work.clone());
    // A server of S3.
    let moto = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/moto/bin");
    let search = format!("{}:{}:{}", names.display(), moto.display(), std::env::var("PATH").unwrap());
    let mut wrong = Vec::new();
    for example in examples(&fs::read_to_string(path).unwrap()) {
        let output = finish(
            Command::new("bash")
                .arg("-c")
                .arg(format!("exec 2>&1\n{}", example.command))
                .current_dir(&work)
                .env("PATH", &search)
                .env("LC_ALL", "C")
                .env("NACRE_STATE_DIR", place.path().join("state"))
                .env("NO_COLOR", "1")
                .env("COLUMNS", "200"),
        );
        let said = text(&output.stdout);
        let lines: Vec<&str> = said.lines().collect();
        if output.status.code() != Some(example.code) || !fits(&example.output, &lines) {
            let place = format!("{}:{}", path.file_name().unwrap().to_string_lossy(), example.line);
            wrong.push(format!(
                "{place}: $ {}\n  exit code {:?}, wanted {}\n{said}",
                example.command,
                output.status.code(),
                example.code
            ));
        }
    }
    crate::mounting::clear(place.path());
    wrong
}

#[test]
fn every_page_tells_the_truth() {
    needs!(as_root());
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let wanted = std::env::var("NACRE_TEST_PAGE").unwrap_or_default();
    let directories = ["docs", "docs/commands"].map(|directory| fs::read_dir(root.join(directory)).unwrap());
    let documents = directories.into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = documents.chain([root.join("README.md")]).collect();
    pages.retain(|page| page.file_name().unwrap().to_string_lossy().contains(&wanted));
    if !root.join("target/tools/moto/bin/moto_server").exists() {
        skip("objects", "there is no moto: the examples of docs/object-store.md are left out");
        pages.retain(|page| !page.ends_with("docs/object-store.md"));
    }
    pages.sort();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages.iter().filter(|page| page.extension().is_some_and(|suffix| suffix == "md")) {
        count += examples(&fs::read_to_string(page).unwrap()).len();
        wrong.extend(run_page(page));
    }
    assert!(count >= 20 || !wanted.is_empty(), "only {count} examples were found");
    assert!(wrong.is_empty(), "{} of {count} examples are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
