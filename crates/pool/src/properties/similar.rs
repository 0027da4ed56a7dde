//! Suggestions of properties for a mistyped name. Pure; called for messages only.

use super::Definition;

/// Largest number of suggestions.
const MOST: usize = 3;

/// Returns the names of a table that are most similar to a name that is not in it, the best first;
/// empty if none is similar.
pub(super) fn similar(wrong: &str, table: &[Definition]) -> Vec<&'static str> {
    let wrong: Vec<char> = wrong.to_lowercase().chars().collect();
    // A third of its letters may be wrong.
    let allowed = (wrong.len() / 3).clamp(1, 3);
    let mut found: Vec<(usize, &'static str)> = Vec::new();
    for definition in table {
        let spelled = |name: &str| distance(&wrong, &name.chars().collect::<Vec<char>>());
        let begun = wrong.len() > 2 && definition.name.chars().collect::<Vec<char>>().starts_with(&wrong);
        let least = definition.short.map_or(usize::MAX, spelled).min(spelled(definition.name));
        if begun || least <= allowed {
            found.push((if begun { 0 } else { least }, definition.name));
        }
    }
    found.sort_by_key(|(least, _)| *least);
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// Edit distance: number of letters to add, remove, change, or swap with their neighbours to turn
/// one into the other.
fn distance(from: &[char], to: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, letter) in from.iter().enumerate() {
        let mut next = vec![line + 1];
        for (column, other) in to.iter().enumerate() {
            let at = |row: &[usize], column: usize| row.get(column).copied().unwrap_or(usize::MAX / 2);
            let mut least = (at(&row, column) + usize::from(letter != other))
                .min(at(&row, column + 1) + 1)
                .min(at(&next, column) + 1);
            let swapped =
                line > 0 && column > 0 && from.get(line - 1) == Some(other) && to.get(column - 1) == Some(letter);
            if swapped {
                least = least.min(at(&before, column - 1) + 1);
            }
            next.push(least);
        }
        (before, row) = (row, next);
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties::{DATASET_PROPERTIES, POOL_PROPERTIES};

    #[test]
    fn what_is_mistyped_is_recognised() {
        for (wrong, meant) in [
            ("compresion", "compression"),
            ("Compression", "compression"),
            ("qouta", "quota"),
            ("mountpiont", "mountpoint"),
            ("recsiz", "recordsize"),
            ("snapdir", "snapdir"),
            ("record", "recordsize"),
        ] {
            assert_eq!(
                similar(wrong, DATASET_PROPERTIES).first(),
                Some(&meant),
                "{wrong}: {:?}",
                similar(wrong, DATASET_PROPERTIES)
            );
        }
        assert_eq!(similar("autotirm", POOL_PROPERTIES), ["autotrim"]);
        assert!(similar("zzzzzz", DATASET_PROPERTIES).is_empty());
        assert!(similar("", DATASET_PROPERTIES).is_empty());
    }
}
