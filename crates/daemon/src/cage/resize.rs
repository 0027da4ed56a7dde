//! `nacre cage resize`: changes the limit of a cage in use, for all engines.

use super::{
    change::{InodeChange, SizeChange},
    find,
};
use crate::{
    control::{self, Answer, Request},
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_layers::size::Size;
use std::path::Path;

/// Carries out the command; returns messages for the user.
///
/// # Errors
/// No cage of that name, or a limit that its engine cannot take.
pub fn run(directory: &Path, size: Option<SizeChange>, inodes: Option<InodeChange>) -> Result<Vec<String>, Failure> {
    if let Some((peer, cage)) = find::served(control::find(&control::whose(&[directory.to_owned()])).peers, directory)?
    {
        let answer = peer.ask(&Request::ResizeCage { cage, size, inodes })?;
        let Answer::Cage(cage) = answer else {
            return Err(Failure::new(format!(
                "the process that serves {} answers something else",
                peer.report.mountpoint
            ))
            .exit(Exit::Failure));
        };
        return Ok(crowded(&path_text(directory), cage.used, cage.limit));
    }
    let Some(record) = find::record(directory)? else { return Err(find::missing(directory)) };
    let text = path_text(directory);
    let bytes = size.map(|change| change.of(Some(record.bytes), &text)).transpose()?;
    let inodes = match inodes {
        Some(InodeChange::None) => {
            return Err(Failure::usage(format!("the engine {} cannot take a limit of inodes back", record.engine))
                .next("name a larger one"));
        }
        other => other.and_then(InodeChange::limit),
    };
    let mut lines = Vec::new();
    let engine = crate::cage::engines::engine_of(&record)?;
    let record = engine.resize(&record, bytes, inodes, &mut |line| lines.push(line.to_owned()))?;
    let figures = engine.figures(&record)?;
    lines.extend(crowded(&text, figures.used, Some(figures.limit)));
    Ok(lines)
}

/// Returns a message where the usage is above the new limit.
fn crowded(directory: &str, used: u64, limit: Option<u64>) -> Vec<String> {
    match limit {
        Some(limit) if used > limit => vec![format!(
            "{directory} holds {}, more than its new limit of {}: nothing can grow until it holds less",
            Size::new(used).short(),
            Size::new(limit).short()
        )],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_above_the_new_limit_hears_of_it() {
        assert!(crowded("/a", 5, Some(5)).is_empty() && crowded("/a", 5, None).is_empty());
        assert_eq!(
            crowded("/a", 3 << 30, Some(1 << 30)),
            ["/a holds 3G, more than its new limit of 1G: nothing can grow until it holds less"]
        );
    }
}
