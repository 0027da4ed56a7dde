//! Carries out commands on existing unions: sends requests to the processes that serve them, and
//! prints the answers.

use super::{
    balancing,
    command::{DrainHow, TierVerb, UnionVerb},
    list,
};
use crate::{clap_args::View, clock, output};
use nacre_daemon::{
    control::{self, Answer, Peer, Request},
    failure::{Exit, Failure},
    opening,
    report::{path_text, printable},
    runtime::Whose,
    union::{
        place,
        report::{BranchReport, DrainReport, FindingReport, PathReport, TierRunReport, TieringReport},
        requests::{UnionAnswer, UnionRequest},
        serving,
    },
};
use nacre_layers::size::Size;
use nacre_stack::{
    self as stack,
    spec::{BranchSource, BranchSpec, Branches, HostCoherence, LayerSpec, StackSpec, UnionSpec},
};
use nacre_union::BranchMode;
use serde::Serialize;
use std::{
    ffi::OsStr,
    io::{self, IsTerminal, Write},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    time::Duration,
};

/// Carries out a command.
///
/// # Errors
/// No such union, or its error.
pub fn run(verb: &UnionVerb) -> Result<(), Failure> {
    match verb {
        UnionVerb::List { view, mountpoints } => list(view, mountpoints),
        UnionVerb::Where { json, all, paths } => location(*json, *all, paths),
        UnionVerb::Explain { json, directory, path } => explain(*json, *directory, path),
        UnionVerb::Check { json, repair, what } => check(*json, *repair, what),
        UnionVerb::Add { mountpoint, branch, place } => {
            let mut branch = branch.clone();
            match &mut branch.source {
                BranchSource::Directory(path) => opening::absolute(path)?,
                BranchSource::Stack(stack) => stack.directories_mut().into_iter().try_for_each(opening::absolute)?,
            }
            change(mountpoint, UnionRequest::Add { branch: branch.text().into_vec(), place: *place })
        }
        UnionVerb::Remove { mountpoint, branch, force } => {
            change(mountpoint, UnionRequest::Remove { branch: absolute(branch)?, force: *force })
        }
        UnionVerb::Modify { mountpoint, branch, mode } => {
            change(mountpoint, UnionRequest::Modify { branch: absolute(branch)?, mode: mode.to_string() })
        }
        UnionVerb::Move { up, paths } => paths.iter().try_for_each(|path| {
            let (peer, inner) = around(path)?;
            ask(&peer, UnionRequest::Move { path: inner, up: *up }).map(drop)
        }),
        UnionVerb::Tier { mountpoint, json, what } => tier(mountpoint, *json, what),
        UnionVerb::Balance { mountpoint, rules, how } => balancing::run(mountpoint, rules, *how),
        UnionVerb::Drain { mountpoint, branch, how } => drain(mountpoint, absolute(branch)?, *how),
    }
}

/// Formats a value as JSON.
///
/// # Errors
/// A value that cannot be serialized; none exists here.
pub fn json(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(value)
        .map(|text| text + "\n")
        .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))
}

fn absolute(branch: &Path) -> Result<Vec<u8>, Failure> {
    let mut path = branch.to_owned();
    opening::absolute(&mut path)?;
    Ok(path.into_os_string().into_vec())
}

fn is_union(peer: &Peer) -> bool {
    StackSpec::from_line(peer.report.stack.as_bytes())
        .is_ok_and(|spec| matches!(spec.layers.first(), Some(LayerSpec::Union(_))))
}

pub(super) fn ask(peer: &Peer, request: UnionRequest) -> Result<UnionAnswer, Failure> {
    match peer.ask(&Request::Union(request))? {
        Answer::Union(answer) => Ok(answer),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &impl std::fmt::Debug) -> Failure {
    Failure::new(format!("the process that serves the union answers something else: {answer:?}"))
        .next("is it another version of the program? Unmount and mount again")
}

/// Returns the union at a mount point.
pub(super) fn at(mountpoint: &Path) -> Result<Peer, Failure> {
    let peer = control::at(&[mountpoint.to_owned()])?.into_iter().next();
    let text = path_text(mountpoint);
    let none = || {
        Failure::new(format!("{text} is no union"))
            .exit(Exit::NotFound)
            .next("`nacre union list` shows those that there are")
    };
    peer.filter(is_union).ok_or_else(none)
}

/// Returns the union that contains a path, and the path relative to its root.
fn around(path: &Path) -> Result<(Peer, Vec<u8>), Failure> {
    let real = control::lexical(path)?;
    let mut peers: Vec<Peer> = control::find(&control::whose(std::slice::from_ref(&real))).peers;
    for above in real.ancestors() {
        let text = path_text(above);
        if let Some(place) = peers.iter().position(|peer| peer.report.mountpoint == text) {
            let peer = peers.swap_remove(place);
            if !is_union(&peer) {
                break;
            }
            let inner = real.strip_prefix(above).unwrap_or(Path::new(""));
            return Ok((peer, inner.as_os_str().as_bytes().to_vec()));
        }
    }
    Err(Failure::new(format!("{} is in no union", path_text(path)))
        .exit(Exit::NotFound)
        .next("`nacre union list` shows the unions that there are"))
}

fn list(view: &View, mountpoints: &[PathBuf]) -> Result<(), Failure> {
    let peers = match mountpoints {
        [] => control::find(&Whose::told(view.everybody)).peers.into_iter().filter(is_union).collect(),
        named => named.iter().map(|mountpoint| at(mountpoint)).collect::<Result<Vec<_>, _>>()?,
    };
    let mut branches = Vec::new();
    for peer in &peers {
        match ask(peer, UnionRequest::List)? {
            UnionAnswer::Branches(told) => branches.extend(told),
            other => return Err(unexpected(&other)),
        }
    }
    branches.iter_mut().for_each(sanitise);
    output::print(&list::text(&branches, view, io::stdout().is_terminal())?)
}

/// Escapes the texts of a branch: other users' processes may send anything.
pub fn sanitise(branch: &mut BranchReport) {
    for text in [&mut branch.mountpoint, &mut branch.branch, &mut branch.mode, &mut branch.state] {
        if text.chars().any(char::is_control) {
            *text = printable(text.as_bytes());
        }
    }
}

fn path(path: &Path, directory: bool) -> Result<PathReport, Failure> {
    let (peer, inner) = around(path)?;
    match ask(&peer, UnionRequest::Explain { path: inner, directory })? {
        UnionAnswer::Path(told) => Ok(PathReport { path: path_text(path), ..*told }),
        other => Err(unexpected(&other)),
    }
}

fn location(as_json: bool, all: bool, paths: &[PathBuf]) -> Result<(), Failure> {
    let told = paths.iter().map(|named| path(named, false)).collect::<Result<Vec<_>, _>>()?;
    if as_json {
        return output::print(&json(&told)?);
    }
    let mut text = String::new();
    for told in &told {
        match &told.file {
            _ if all => told
                .here
                .iter()
                .for_each(|here| text.push_str(&format!("{}\t{}\t{}\n", told.path, here.branch, here.state))),
            Some(file) => text.push_str(&format!("{file}\n")),
            None => {
                return Err(Failure::new(format!("there is no {}", told.path))
                    .exit(Exit::NotFound)
                    .next("`nacre union explain` says where it would be created"));
            }
        }
    }
    output::print(&text)
}

fn explain(as_json: bool, directory: bool, named: &Path) -> Result<(), Failure> {
    let told = path(named, directory)?;
    if as_json {
        return output::print(&json(&told)?);
    }
    let mut text = String::new();
    for here in &told.here {
        let what = match here.state.as_str() {
            "hidden" => "hidden by a branch above",
            "whiteout" => "a whiteout",
            state => state,
        };
        text.push_str(&format!("{}: {what}\n", here.branch));
    }
    let chosen = told.chosen.as_deref().unwrap_or("nowhere");
    text.push_str(&format!("{}: {chosen}: {}\n", told.rule, told.because));
    told.refused.iter().for_each(|(branch, why)| text.push_str(&format!("  not {branch}: {why}\n")));
    output::print(&text)
}

fn check(as_json: bool, repair: bool, what: &OsStr) -> Result<(), Failure> {
    let mounted = at(Path::new(what)).ok();
    let findings = match mounted {
        Some(peer) => match ask(&peer, UnionRequest::Check { repair })? {
            UnionAnswer::Findings(findings) => findings,
            other => return Err(unexpected(&other)),
        },
        None => check_branches(repair, what)?,
    };
    let text = match as_json {
        true => json(&findings)?,
        false => findings
            .iter()
            .map(|finding| {
                let repaired = if finding.repaired { " (repaired)" } else { "" };
                format!("{}: {}: {}{repaired}\n", finding.branch, finding.path, finding.text)
            })
            .collect(),
    };
    output::print(&text)?;
    match findings.iter().filter(|finding| !finding.repaired).count() {
        0 => Ok(()),
        1 => Err(Failure::new("one thing is not as it should be; it hides and shows no wrong file")
            .next("--repair puts it right")),
        left => Err(Failure::new(format!("{left} things are not as they should be; they hide and show no wrong file"))
            .next("--repair puts them right")),
    }
}

/// Checks the branches without a mount, opening them as a mount would.
fn check_branches(repair: bool, text: &OsStr) -> Result<Vec<FindingReport>, Failure> {
    let branches = BranchSpec::parse_list(text.as_bytes(), true, false)
        .map_err(|error| Failure::usage(format!("WHAT: {error}")))?;
    let union = UnionSpec { branch: Branches(branches), coherence: HostCoherence::Exclusive, ..UnionSpec::default() };
    let mut spec = StackSpec { layers: vec![LayerSpec::Union(Box::new(union))] };
    spec.directories_mut().into_iter().try_for_each(opening::absolute)?;
    spec.check().map_err(|error| Failure::usage(error.to_string()))?;
    let named = spec.directories().into_iter().map(place::branch).collect::<Result<Vec<_>, _>>()?;
    if let [only] = named.as_slice()
        && !only.join(".wh..wh.work").is_dir()
    {
        return Err(Failure::new(format!(
            "{} is neither the mount point of a union nor a branch of one",
            path_text(only)
        ))
        .exit(Exit::NotFound)
        .next("name a mount point, or all branches as they are mounted: /upper=rw:/lower=ro"));
    }
    // A check without repair writes nothing, although opening a writable branch may write to it.
    let written = (!repair).then(|| read_only(&mut spec));
    let stack =
        stack::build(&spec, &opening::surroundings()?).map_err(|error| Failure::of_stack(&error, error.reason))?;
    serving::check(&stack, repair, written.as_deref())
}

/// Makes all branches read-only; returns which of them were writable.
fn read_only(spec: &mut StackSpec) -> Vec<bool> {
    let unions = spec
        .layers
        .iter_mut()
        .filter_map(|layer| if let LayerSpec::Union(union) = layer { Some(&mut union.branch.0) } else { None });
    let branches = unions.flatten().map(|branch| {
        let written = branch.mode.writable();
        if written {
            branch.mode = BranchMode { whiteouts: true, ..BranchMode::ro() };
        }
        written
    });
    branches.collect()
}

fn change(mountpoint: &Path, request: UnionRequest) -> Result<(), Failure> {
    match ask(&at(mountpoint)?, request)? {
        UnionAnswer::Changed { warnings } => {
            warnings.iter().for_each(|warning| tell(warning));
            Ok(())
        }
        other => Err(unexpected(&other)),
    }
}

/// Writes a line to standard error; a failure to write it is ignored.
pub(super) fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "nacre: {}", printable(line.as_bytes()));
}

fn drain(mountpoint: &Path, branch: Vec<u8>, how: DrainHow) -> Result<(), Failure> {
    let peer = at(mountpoint)?;
    if how == DrainHow::Stop {
        return ask(&peer, UnionRequest::StopDrain { branch }).map(drop);
    }
    ask(&peer, UnionRequest::Drain { branch })?;
    if how == DrainHow::Start {
        return Ok(());
    }
    let terminal = io::stderr().is_terminal();
    loop {
        let UnionAnswer::Drain(told) = ask(&peer, UnionRequest::DrainStatus)? else {
            return Err(Failure::new("the union does not say how far it is"));
        };
        if terminal {
            let _ = write!(io::stderr(), "\r{} files, {} moved\x1b[K", told.moved, Size::new(told.bytes).short());
        }
        if told.ended {
            if terminal {
                let _ = writeln!(io::stderr());
            }
            return drained(&told);
        }
        clock::pause(Duration::from_millis(100));
    }
}

fn drained(told: &DrainReport) -> Result<(), Failure> {
    for (path, why) in &told.left {
        let path = if path.is_empty() { "/" } else { path };
        tell(&format!("{} stays: {}", printable(path.as_bytes()), printable(why.as_bytes())));
    }
    if let Some(why) = &told.failed {
        return Err(Failure::new(printable(why.as_bytes())));
    }
    match told.stays {
        0 => Ok(()),
        left => {
            Err(Failure::new(format!("{left} files or directories are still on {}", printable(told.branch.as_bytes())))
                .exit(Exit::Busy)
                .next("`nacre union drain` again tries them again"))
        }
    }
}

fn tier(mountpoint: &Path, as_json: bool, what: &TierVerb) -> Result<(), Failure> {
    let request = match what {
        TierVerb::Status => UnionRequest::Tier,
        TierVerb::Rules(rules) => UnionRequest::TierRules { rules: rules.clone() },
        TierVerb::Run { dry } => UnionRequest::TierRun { dry: *dry },
    };
    match ask(&at(mountpoint)?, request)? {
        UnionAnswer::Changed { .. } => Ok(()),
        UnionAnswer::Tier(told) => output::print(&if as_json { json(&told)? } else { tiering(&told) }),
        UnionAnswer::TierRun(told) => output::print(&if as_json { json(&told)? } else { moves(&told) }),
        other => Err(unexpected(&other)),
    }
}

fn tiering(told: &TieringReport) -> String {
    let mut text = format!("rules   {}\n", printable(told.rules.as_bytes()));
    for tier in &told.tiers {
        let percent = tier.used.saturating_mul(100).checked_div(tier.size).unwrap_or(0);
        let (used, size) = (Size::new(tier.used).short(), Size::new(tier.size).short());
        text.push_str(&format!("tier    {}: {used} of {size} used ({percent}%)\n", printable(tier.branch.as_bytes())));
    }
    if told.tiers.len() < 2 {
        text.push_str("        less than two branches are rw+tier: nothing is moved\n");
    }
    let bytes = Size::new(told.bytes).short();
    let busy = if told.busy { ", at it now" } else { "" };
    text.push_str(&format!("moved   {} up, {} down, {bytes}{busy}\n", told.moved_up, told.moved_down));
    text
}

fn moves(told: &TierRunReport) -> String {
    let mut text = String::new();
    for plan in &told.planned {
        let [path, from, to, why] =
            [&plan.path, &plan.from, &plan.to, &plan.why].map(|text| printable(text.as_bytes()));
        text.push_str(&format!("{path}: {from} -> {to} ({}, {why})\n", Size::new(plan.bytes).short()));
    }
    for (path, why) in &told.left {
        let path = if path.is_empty() { "/" } else { path };
        text.push_str(&format!("{} stays: {}\n", printable(path.as_bytes()), printable(why.as_bytes())));
    }
    text
}
