//! Man pages: one per command, generated from the table of commands, with the sections of
//! man-pages(7), and nacre-properties(7). Called by `nacre man`.

mod properties;

use crate::commands;
use clap::Command;
use clap_mangen::{
    Man,
    roff::{Inline, Roff, bold, roman},
};
use nacre_daemon::failure::Failure;
use std::{fs, io, path::Path};

/// Writes the pages into a directory, which is created where it is missing; returns the names of
/// the files.
///
/// A directory that cannot be created, a file that cannot be written.
/// A directory that cannot be created, a file that cannot be written.
pub fn man(directory: &Path) -> Result<Vec<String>, Failure> {
    let mut table = commands::table().disable_help_subcommand(true);
    table.build();
    let made = fs::create_dir_all(directory);
    made.map_err(|error| Failure::io("cannot make the directory", directory.display(), &error))?;
    let mut names = Vec::new();
    pages(&table, "nacre", directory, &mut names)?;
    write(&directory.join("nacre-properties.7"), properties::page().into_bytes(), &mut names)?;
    Ok(names)
}

fn write(file: &Path, text: Vec<u8>, names: &mut Vec<String>) -> Result<(), Failure> {
    fs::write(file, text).map_err(|error| Failure::io("cannot write", file.display(), &error))?;
    names.push(file.display().to_string());
    Ok(())
}

/// Writes the page of a command, and the pages of its subcommands.
fn pages(command: &Command, name: &str, directory: &Path, names: &mut Vec<String>) -> Result<(), Failure> {
    let file = directory.join(format!("{name}.1"));
    let text = page(command, name).map_err(|error| Failure::io("cannot write", file.display(), &error))?;
    write(&file, text, names)?;
    for below in shown(command) {
        pages(below, &format!("{name}-{}", below.get_name()), directory, names)?;
    }
    Ok(())
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

fn page(command: &Command, name: &str) -> io::Result<Vec<u8>> {
    let typed = name.replace('-', " ").replace("fuse overlayfs", "fuse-overlayfs");
    let source = format!("nacre {}", env!("CARGO_PKG_VERSION"));
    let mut named = command.clone().name(name.to_owned()).display_name(name.to_owned()).bin_name(typed);
    let usage = named.render_usage().to_string();
    let man = Man::new(named.override_usage(usage.trim_start_matches("Usage:").trim().to_owned()));
    let (examples, notes) = taken_apart(&command.get_after_help().map(ToString::to_string).unwrap_or_default());
    // Without a date: the build's would be misleading.
    let mut text = format!(".TH \"{}\" 1 \"\" \"{source}\" \"nacre\"\n", name.to_uppercase()).into_bytes();
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    paragraphs(&notes).to_writer(&mut text)?;
    let (options, groups) = by_heading(command, &man)?;
    text.extend(options);
    text.extend(groups);
    if shown(command).next().is_some() {
        subcommands(command, name).to_writer(&mut text)?;
    }
    for part in [self::examples(&examples), files(name), exit_status(name), see_also(command, name)] {
        part.to_writer(&mut text)?;
    }
    Ok(text)
}

/// Renders the options without a heading, and the groups of the options with one: a page has one
/// section OPTIONS, and the groups are parts of it.
fn by_heading(command: &Command, man: &Man) -> io::Result<(Vec<u8>, Vec<u8>)> {
    if command.get_arguments().all(|arg| arg.is_hide_set()) {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut text = Vec::new();
    man.render_options_section(&mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let mut options = String::new();
    let mut groups = String::new();
    let (mut in_group, mut first) = (false, true);
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix(".SH ") {
            in_group = heading.trim_matches('"') != "OPTIONS";
            if in_group && first && options.is_empty() {
                options.push_str(".SH OPTIONS\n");
            }
            first = false;
            if in_group {
                groups.push_str(&format!(".SS {}\n", capitalised(heading)));
                continue;
            }
        }
        let part = if in_group { &mut groups } else { &mut options };
        part.push_str(line);
        part.push('\n');
    }
    Ok((options.into_bytes(), groups.into_bytes()))
}

/// Capitalises a heading for running text.
fn capitalised(heading: &str) -> String {
    let lower = heading.to_lowercase();
    let quoted = lower.starts_with('"');
    let mut letters = lower.trim_start_matches('"').chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase()).into_iter();
    quoted.then_some('"').into_iter().chain(first).chain(letters).collect()
}

/// Splits the text below the options in help into examples and notes.
fn taken_apart(help: &str) -> (Vec<String>, Vec<String>) {
    let (examples, notes): (Vec<&str>, Vec<&str>) =
        help.lines().filter(|line| *line != "Examples:").partition(|line| line.starts_with("  "));
    let kept = |lines: Vec<&str>| lines.into_iter().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    (kept(examples), kept(notes).into_iter().filter(|line| !line.is_empty()).collect())
}

fn paragraphs(notes: &[String]) -> Roff {
    let mut roff = Roff::new();
    for note in notes {
        roff.control("PP", []).text([roman(note)]);
    }
    roff
}

fn subcommands(command: &Command, name: &str) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["COMMANDS"]);
    for below in shown(command) {
        roff.control("TP", []).text([bold(format!("{name}-{}", below.get_name())), roman("(1)")]);
        roff.text([roman(below.get_about().map(ToString::to_string).unwrap_or_default())]);
    }
    roff
}

fn examples(lines: &[String]) -> Roff {
    let mut roff = Roff::new();
    if !lines.is_empty() {
        roff.control("SH", ["EXAMPLES"]).control("nf", []);
        for line in lines {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
    }
    roff
}

/// Returns a list of terms in bold, each with its meaning.
fn list(heading: &str, rows: &[(&str, &str)]) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", [heading]);
    for (what, meaning) in rows {
        roff.control("TP", []).text([bold(*what)]).text([roman(*meaning)]);
    }
    roff
}

/// Returns the family of a command: the word after the program's name.
fn family(name: &str) -> &str {
    name.split('-').nth(1).unwrap_or_default()
}

fn files(name: &str) -> Roff {
    const SOCKETS: (&str, &str) = (
        "/run/nacre",
        "Sockets of the processes that serve root's mounts, and locks of the branches that their unions write to (of others: $XDG_RUNTIME_DIR/nacre, or /tmp/nacre-UID, where that name is taken /tmp/nacre-UID-UUID)",
    );
    const FUSE: (&str, &str) =
        ("/etc/fuse.conf", "Whether ordinary users may show their mounts to others (user_allow_other)");
    const CAGES: (&str, &str) = (
        "/var/lib/nacre/cage",
        "The accounts of root's cages (of others: $XDG_STATE_HOME/nacre/cage, or ~/.local/state/nacre/cage)",
    );
    const POOLS: (&str, &str) = (
        "/var/lib/nacre/pools",
        "Where each pool lay when it was last imported (of others: $XDG_STATE_HOME/nacre/pools, or ~/.local/state/nacre/pools)",
    );
    const WORKSPACES: (&str, &str) = (
        "/var/lib/nacre/workspaces",
        "The changes and settings of root's workspaces (of others: $XDG_STATE_HOME/nacre/workspaces, or ~/.local/state/nacre/workspaces)",
    );
    const LOGS: (&str, &str) = ("/run/nacre/POOL.log", "What the process of a pool had to say");
    let rows: &[(&str, &str)] = match family(name) {
        "" => &[SOCKETS, CAGES, POOLS, FUSE],
        "cage" => &[CAGES, SOCKETS, FUSE],
        "workspace" => &[WORKSPACES, SOCKETS],
        "pool" | "fs" => &[POOLS, LOGS, SOCKETS],
        "bench" | "completions" | "man" | "copy" => return Roff::new(),
        _ => &[SOCKETS, FUSE],
    };
    list("FILES", rows)
}

fn exit_status(name: &str) -> Roff {
    let rows: &[(&str, &str)] = match family(name) {
        "bindfs" | "fuse" | "mergerfs" => &[("0", "Done."), ("1", "Everything else.")],
        "bench" => &[("0", "Done."), ("1", "It could not be measured."), ("2", "The command line is wrong.")],
        "workspace" => &[
            ("0", "Done; diff: without changes."),
            ("1", "It could not be done; diff: with changes."),
            ("2", "The command line is wrong."),
            ("3", "Something that was named does not exist."),
            ("4", "This user is not allowed to do it; commit: others have changed the same paths."),
            ("5", "It is in use."),
        ],
        "doctor" => &[("0", "Mounts can be made."), ("1", "Something is missing that every mount needs.")],
        _ => &[
            ("0", "Done."),
            ("1", "It could not be done."),
            ("2", "The command line is wrong."),
            ("3", "Something that was named does not exist."),
            ("4", "This user is not allowed to do it."),
            ("5", "It is in use."),
        ],
    };
    list("EXIT STATUS", rows)
}

fn see_also(command: &Command, name: &str) -> Roff {
    let mut pages: Vec<(String, &str)> = Vec::new();
    let mut above = name;
    // The one command with a hyphen in its name lies below the program itself.
    while let Some((parent, _)) = above.rsplit_once('-').filter(|_| name != "nacre-fuse-overlayfs") {
        pages.push((parent.to_owned(), "1"));
        above = parent;
    }
    if name == "nacre-fuse-overlayfs" {
        pages.push(("nacre".to_owned(), "1"));
    }
    pages.extend(shown(command).map(|below| (format!("{name}-{}", below.get_name()), "1")));
    pages.extend(match family(name) {
        "mirror" | "bindfs" | "mergerfs" | "union" | "cage" | "mount" => {
            vec![("fstab".to_owned(), "5"), ("mount".to_owned(), "8")]
        }
        "umount" => vec![("umount".to_owned(), "8")],
        "" | "doctor" => vec![("fuse".to_owned(), "4"), ("mount".to_owned(), "8")],
        "pool" | "fs" => vec![("nacre-properties".to_owned(), "7")],
        _ => Vec::new(),
    });
    let mut roff = Roff::new();
    let mut line: Vec<Inline> = Vec::new();
    for (index, (page, section)) in pages.into_iter().enumerate() {
        line.extend([roman(if index == 0 { "" } else { ", " }), bold(page), roman(format!("({section})"))]);
    }
    if !line.is_empty() {
        roff.control("SH", ["SEE ALSO"]).text(line);
    }
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every page has the sections of man-pages(7), in their order, and no other at that level.
    #[test]
    fn pages_have_the_sections_that_readers_look_for() {
        let directory = tempfile::tempdir().unwrap();
        let pages = man(directory.path()).unwrap();
        assert!(pages.len() > 60, "{}", pages.len());
        let known =
            ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "EXAMPLES", "FILES", "EXIT STATUS", "SEE ALSO"];
        for page in pages.iter().filter(|page| page.ends_with(".1")) {
            let text = fs::read_to_string(page).unwrap();
            let heads: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix(".SH ")).map(|head| head.trim_matches('"')).collect();
            let mut places = heads
                .iter()
                .map(|head| known.iter().position(|known| known == head).unwrap_or_else(|| panic!("{page}: {head}")));
            assert!(places.clone().is_sorted(), "{page}: {heads:?}");
            assert!(places.by_ref().count() == heads.len() && heads[..3] == known[..3], "{page}: {heads:?}");
            assert!(heads.contains(&"EXIT STATUS") && heads.contains(&"SEE ALSO"), "{page}: {heads:?}");
            assert!(!text.contains("Examples:"), "{page}");
        }
    }
}
