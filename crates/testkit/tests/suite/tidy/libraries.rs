//! What `deny.toml` says of the libraries, checked against what cargo resolves: licences, sources,
//! double versions.
//!
//! `cargo deny` reads the same file and knows more (advisories); this needs no program but cargo,
//! so that each run of the tests has it.

use std::collections::BTreeMap;
use std::process::Command;

use super::{Complaints, root};

/// The index that cargo names as the source of what comes from crates.io.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn rules() -> toml::Table {
    std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

fn words(value: &toml::Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// All packages that are built for this machine, ours as well. Those of other systems need not have
/// been downloaded.
fn packages() -> Vec<serde_json::Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &target])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["packages"].as_array().unwrap().clone()
}

fn shown(package: &serde_json::Value) -> String {
    format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap())
}

#[test]
fn libraries_have_licences_that_ours_works_with() {
    let allowed = words(&rules()["licenses"]["allow"]);
    let mut complaints = Complaints::default();
    for package in packages() {
        match package["license"].as_str() {
            Some(terms) if is_allowed(terms, &allowed) => {}
            terms => complaints.add(&shown(&package), 0, format_args!("{terms:?} is not allowed by deny.toml")),
        }
    }
    complaints.none();
}

#[test]
fn libraries_come_from_one_place_in_one_version() {
    let rules = rules();
    assert_eq!(words(&rules["sources"]["allow-registry"]), [CRATES_IO.strip_prefix("registry+").unwrap()]);
    assert!(words(&rules["sources"]["allow-git"]).is_empty());
    let skipped: Vec<(&str, &str)> = rules["bans"]["skip"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["crate"].as_str().unwrap().split_once('@').expect("name@version"))
        .collect();
    // Some are there for others that are named.
    let banned: Vec<(&str, Vec<String>)> = rules["bans"]["deny"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["crate"].as_str().unwrap(), one.get("wrappers").map(words).unwrap_or_default()))
        .collect();
    let mut complaints = Complaints::default();
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages() {
        let (name, shown) = (package["name"].as_str().unwrap(), shown(&package));
        if banned.iter().any(|(banned, users)| *banned == name && users.is_empty()) {
            complaints.add(&shown, 0, "is banned by deny.toml");
        }
        let uses = |library: &str| {
            let needed = package["dependencies"].as_array().unwrap().iter();
            needed.filter(|one| one["kind"].is_null() && one["optional"] == false).any(|one| one["name"] == library)
        };
        for (library, users) in banned.iter().filter(|(_, users)| !users.is_empty()) {
            if uses(library) && !users.iter().any(|user| user == name) {
                complaints.add(&shown, 0, format_args!("uses {library}, which deny.toml allows others alone"));
            }
        }
        // Ours have no source; what is taken from a folder elsewhere has none either.
        let ours = package["manifest_path"].as_str().unwrap().starts_with(root().to_str().unwrap());
        let right = package["source"].as_str().map_or(ours, |source| source == CRATES_IO);
        if !right {
            complaints.add(&shown, 0, format_args!("comes from {}", package["source"]));
        }
        let version = package["version"].as_str().unwrap();
        let is_skipped = |(known, part): &(&str, &str)| *known == name && version.starts_with(&format!("{part}."));
        if !skipped.iter().any(is_skipped) {
            versions.entry(name.to_owned()).or_default().push(shown);
        }
    }
    for several in versions.values().filter(|versions| versions.len() > 1) {
        complaints.add("Cargo.lock", 0, format_args!("a library in several versions: {}", several.join(", ")));
    }
    complaints.none();
}

/// Whether terms as a package states them (an SPDX expression; `/` is an old word for `OR`) can be
/// met by allowed licences only.
fn is_allowed(terms: &str, allowed: &[String]) -> bool {
    let spaced = terms.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut rest = spaced.split_whitespace().peekable();
    let answer = either(&mut rest, allowed);
    answer && rest.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn either(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut answer = both(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        answer |= both(words, allowed);
    }
    answer
}

fn both(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut answer = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        answer &= one(words, allowed);
    }
    answer
}

fn one(words: &mut Words<'_>, allowed: &[String]) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let answer = either(words, allowed);
        return words.next() == Some(")") && answer;
    }
    let Some(name) = words.next() else { return false };
    let mut name = name.to_owned();
    if words.next_if_eq(&"WITH").is_some() {
        // An exception is a licence of its own: allowed where it is listed with its exception.
        name = format!("{name} WITH {}", words.next().unwrap_or_default());
    }
    allowed.contains(&name)
}

#[test]
fn licence_terms_are_read_rightly() {
    let allowed = ["MIT", "Apache-2.0", "Unicode-3.0"].map(str::to_owned);
    for good in [
        "MIT",
        "MIT/Apache-2.0",
        "GPL-2.0 OR MIT",
        "(MIT OR GPL-2.0) AND Unicode-3.0",
        "GPL-3.0 WITH x OR (MIT AND Apache-2.0)",
    ] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in [
        "",
        "GPL-2.0",
        "MIT AND GPL-2.0",
        "GPL-2.0 OR",
        "(MIT",
        "MIT)",
        "MIT Apache-2.0",
        "MIT WITH x",
        "(GPL-2.0 OR MPL-2.0) AND MIT",
    ] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}
