//! Parsers of user input: sizes, rules of modes and ids, lists of branches, patterns, stacks. A
//! parsed value can be written and is parsed as the same again.

use std::ffi::OsStr;
use std::fmt::{Debug, Display};
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;

use nacre_layers::remap::{acl as lists, hide::Hidden, id_map, id_map::IdMap, perms::Perms};
use nacre_layers::size::{LimitRule, Share, Size};
use nacre_stack::spec::{BranchSpec, StackSpec};
use nacre_union::{BranchMode, CopyUpPolicy, CreatePolicy, Route, Routes, TierRules, Words};
use nacre_vfs::Name;

/// Splits at the end of the first line: the text to parse, and a value to apply it to.
fn halves(data: &[u8]) -> (&[u8], &[u8]) {
    let at = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    (data.get(..at).unwrap_or_default(), data.get(at + 1..).unwrap_or_default())
}

fn same<T: FromStr + Display + PartialEq + Debug>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        let shown = value.to_string();
        assert!(shown.parse::<T>().is_ok_and(|read| read == value), "{value:?} is shown as {shown:?}");
    }
}

/// Parses sizes, shares of limits, and limits for users and directories.
pub fn sizes(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    same::<Size>(text);
    same::<Share>(text);
    if let Ok(size) = text.parse::<Size>() {
        assert!(size.limit().is_ok_and(|limit| limit <= size.bytes()) || size.bytes() < nacre_layers::size::BLOCK);
        assert!(size.short().len() <= 8, "{}", size.short());
    }
    if let Ok(share) = text.parse::<Share>() {
        for limit in [0, 1, 1 << 40, u64::MAX] {
            assert!(matches!(share, Share::Size(_)) || share.of(limit) <= limit);
        }
    }
    let _ = text.parse::<LimitRule>();
    let _ = nacre_union::parse_size(text);
    if let Ok(bytes) = nacre_pool::properties::size::parse(text) {
        let _ = nacre_pool::properties::size::human(bytes);
    }
}

/// Parses rules of permissions.
pub fn perms(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(perms) = text.parse::<Perms>() else { return };
    for mode in [0, 0o644, 0o755, 0o7777] {
        for directory in [false, true] {
            assert!(perms.apply(mode, directory) <= 0o7777);
        }
    }
}

/// Parses maps of ids, divided by colons, and applies them to ids; and patterns of names to hide.
pub fn map_words(data: &[u8]) {
    let (words, rest) = halves(data);
    let Ok(text) = std::str::from_utf8(words) else { return };
    if let Ok(hidden) = Hidden::new(&[text.to_owned()])
        && let Ok(name) = Name::new(rest)
    {
        hidden.hides(name);
    }
    let resolve = |word: &str| word.parse::<u32>().map_err(|error| error.to_string());
    let mut rules = Vec::new();
    if text.split(':').all(|word| id_map::parse_rule(word.trim_start_matches('@'), &resolve, &mut rules).is_ok())
        && let Ok(map) = IdMap::new(&rules)
    {
        for id in rest.chunks(4).filter_map(|id| id.try_into().ok().map(u32::from_le_bytes)).chain([
            0,
            1,
            65_534,
            u32::MAX - 1,
        ]) {
            map.shown(id);
            map.stored(id);
        }
    }
}

/// Parses access control lists in the form of extended attributes.
pub fn acl(data: &[u8]) {
    let mut value = data.to_vec();
    let is_list = lists::mode(data).is_ok();
    assert_eq!(is_list, lists::translate(&mut value, Ok, Ok).is_ok());
    assert_eq!(value, data, "nothing was to be changed");
    let _ = lists::is_minimal(data);
    for mode in [0, 0o640, 0o777] {
        let mut value = data.to_vec();
        if lists::apply_mode(&mut value, mode).is_ok() && is_list && !data.is_empty() {
            assert!(lists::mode(&value).is_ok(), "a list is no list any more");
        }
        let mut value = data.to_vec();
        let _ = lists::limit_to_mode(&mut value, mode);
        let mut value = data.to_vec();
        let _ = lists::rewrite(&mut value, |before| before & mode);
    }
}

/// Parses a stack in one line.
pub fn stack_line(data: &[u8]) {
    let Ok(stack) = StackSpec::from_line(data) else { return };
    let line = stack.to_line();
    assert!(StackSpec::from_line(line.as_bytes()).is_ok_and(|read| read == stack), "{stack:?} is written as {line:?}");
    if let Ok(text) = stack.to_toml() {
        assert!(StackSpec::from_toml(&text).is_ok_and(|read| read == stack), "{stack:?} is written as {text:?}");
    }
    stack.directories();
}

/// Parses a stack file.
pub fn stack_toml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(stack) = StackSpec::from_toml(text) else { return };
    let line = stack.to_line();
    assert!(StackSpec::from_line(line.as_bytes()).is_ok_and(|read| read == stack), "{stack:?} is written as {line:?}");
}

/// Parses rules of tiers, with patterns that are applied to the path of the input.
pub fn tier_words(data: &[u8]) {
    let (words, path) = halves(data);
    if let Ok(route) = Route::parse(OsStr::from_bytes(words))
        && let Ok(routes) = Routes::new(vec![route], &["/a".into(), "/b".into()])
    {
        routes.find(path);
    }
    if let Ok(text) = std::str::from_utf8(words) {
        same::<TierRules>(text);
        same::<CreatePolicy>(text);
        same::<CopyUpPolicy>(text);
    }
}

/// Parses lists of branches with their attributes, and the options of a union.
pub fn union_words(data: &[u8]) {
    let text = OsStr::from_bytes(data);
    let _ = Words::parse(text);
    for list in [nacre_union::parse_branches(text), nacre_union::parse_pool(text)] {
        for (path, mode) in list.unwrap_or_default() {
            let mut shown = nacre_union::escape_path(&path);
            shown.push(format!("={mode}"));
            let read = nacre_union::parse_one(&shown, BranchMode::ro());
            assert!(
                read.is_ok_and(|read| read == (path.clone(), mode.clone())),
                "{path:?}={mode} is written as {shown:?}"
            );
        }
    }
    let (lower, upper) = halves(data);
    let _ =
        nacre_union::parse_overlay((!upper.is_empty()).then_some(OsStr::from_bytes(upper)), OsStr::from_bytes(lower));
    for branch in BranchSpec::parse_list(data, true, false).unwrap_or_default() {
        let shown = branch.text();
        let read = BranchSpec::parse(shown.as_bytes(), BranchMode::ro());
        assert!(read.is_ok_and(|read| read == branch), "{branch:?} is written as {shown:?}");
    }
}
