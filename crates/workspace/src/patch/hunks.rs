//! Hunks of a unified difference.

use similar::{Algorithm, DiffOp, DiffTag, capture_diff_slices_deadline, group_diff_ops};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// Lines shown round a change.
const CONTEXT: usize = 3;
/// After this time, the rest of a file is shown as replaced: a worse difference, not a wrong one.
const TIME_MAX: Duration = Duration::from_secs(5);

/// The difference of two texts.
pub(super) struct Hunks {
    pub(super) text: Vec<u8>,
    /// Percentage of bytes that both have.
    pub(super) similarity: u64,
}

fn lines(text: &[u8]) -> Vec<&[u8]> {
    text.split_inclusive(|byte| *byte == b'\n').collect()
}

/// Compares two texts.
pub(super) fn hunks(old: &[u8], new: &[u8]) -> Hunks {
    let (old_lines, new_lines) = (lines(old), lines(new));
    let deadline = Instant::now() + TIME_MAX;
    let ops = capture_diff_slices_deadline(Algorithm::Myers, &old_lines, &new_lines, Some(deadline));
    let equal = |op: &&DiffOp| op.tag() == DiffTag::Equal;
    let kept: usize = ops
        .iter()
        .filter(equal)
        .flat_map(|op| old_lines.get(op.old_range()).unwrap_or_default())
        .map(|line| line.len())
        .sum();
    let longer = old.len().max(new.len()).max(1);
    let mut text = Vec::new();
    for group in group_diff_ops(ops, CONTEXT) {
        hunk(&group, &old_lines, &new_lines, &mut text);
    }
    Hunks { text, similarity: u64::try_from(kept * 100 / longer).unwrap_or(0) }
}

fn hunk(group: &[DiffOp], old: &[&[u8]], new: &[&[u8]], text: &mut Vec<u8>) {
    let (Some(first), Some(last)) = (group.first(), group.last()) else { return };
    if group.iter().all(|op| op.tag() == DiffTag::Equal) {
        return;
    }
    let old_range = first.old_range().start..last.old_range().end;
    let new_range = first.new_range().start..last.new_range().end;
    text.extend(format!("@@ -{} +{} @@\n", numbers(&old_range), numbers(&new_range)).bytes());
    for op in group {
        let (removed, added) =
            (old.get(op.old_range()).unwrap_or_default(), new.get(op.new_range()).unwrap_or_default());
        match op.tag() {
            DiffTag::Equal => push(b' ', removed, text),
            DiffTag::Delete => push(b'-', removed, text),
            DiffTag::Insert => push(b'+', added, text),
            DiffTag::Replace => {
                push(b'-', removed, text);
                push(b'+', added, text);
            }
        }
    }
}

/// The position of a range: its first line and length; of an empty one the line before.
fn numbers(range: &Range<usize>) -> String {
    match range.len() {
        0 => format!("{},0", range.start),
        1 => format!("{}", range.start + 1),
        length => format!("{},{length}", range.start + 1),
    }
}

fn push(sign: u8, lines: &[&[u8]], text: &mut Vec<u8>) {
    for line in lines {
        text.push(sign);
        text.extend_from_slice(line);
        if !line.ends_with(b"\n") {
            text.extend(b"\n\\ No newline at end of file\n");
        }
    }
}
