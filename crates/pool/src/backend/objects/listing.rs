//! Listing the names of a pool's objects in a bucket, page by page.
//!
//! Callers: the other files of [`Objects`](super::Objects). Other programs may put any number of objects there.
//! Invariant: the memory for a list is bounded, except for lists of objects that this pool has created itself.

use std::collections::BTreeSet;
use std::io;

use super::bucket::Bucket;
use super::{Result, Unknown, failed, place_of};
use crate::label::Place;

/// Number of the newest names of a kind that are kept.
const NEWEST_MOST: usize = 4096;
/// Number of unreferenced segments that one import handles; the others follow at a later import.
const UNKNOWN_MOST: usize = 1 << 18;
/// Maximum distance of an epoch from the newest readable root's.
const EPOCHS_AHEAD_MOST: u32 = 1 << 16;

/// Passes the names of the pool's own objects of a kind that come after another name to `each`, page by page. Another
/// pool may be stored below a prefix that looks like a kind (one in `s3://bucket/tank`, one in
/// `s3://bucket/tank/roots`). A name may be repeated.
pub(super) fn each_page(
    bucket: &dyn Bucket,
    kind: &str,
    after: &str,
    each: &mut dyn FnMut(Vec<String>) -> io::Result<()>,
) -> Result<()> {
    let mut failure = io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..bucket.attempts() {
        let listed = bucket.list_pages(kind, after, &mut |mut keys| {
            keys.retain(|key| is_own(key));
            if keys.is_empty() { Ok(()) } else { each(keys) }
        });
        match listed {
            Ok(()) => return Ok(()),
            Err(error) => failure = error,
        }
    }
    Err(failed(bucket, "listing", failure))
}

/// Lists all names of a kind, sorted.
pub(super) fn own_keys(bucket: &dyn Bucket, kind: &str, after: &str) -> Result<Vec<String>> {
    let mut all = BTreeSet::new();
    each_page(bucket, kind, after, &mut |keys| {
        all.extend(keys);
        Ok(())
    })?;
    Ok(all.into_iter().collect())
}

/// Lists the last names of a kind, sorted.
pub(super) fn newest_keys(bucket: &dyn Bucket, kind: &str, after: &str) -> Result<Vec<String>> {
    let mut newest = BTreeSet::new();
    each_page(bucket, kind, after, &mut |keys| {
        newest.extend(keys);
        while newest.len() > NEWEST_MOST {
            newest.pop_first();
        }
        Ok(())
    })?;
    Ok(newest.into_iter().collect())
}

/// Finds stored segments that `is_known` does not know, up to the limit; and the latest epoch in segment names, from
/// `since` on.
pub(super) fn unknown_segments(
    bucket: &dyn Bucket,
    since: u32,
    is_known: &dyn Fn(u32, &Place) -> bool,
) -> Result<Unknown> {
    let (mut unknown, mut more, mut latest) = (BTreeSet::new(), false, 0);
    each_page(bucket, "seg/", "", &mut |keys| {
        let segments = keys.iter().filter_map(|key| segment_of(key));
        let epochs = segments.clone().map(|(epoch, _)| epoch);
        latest = epochs.filter(|epoch| is_near(since, *epoch)).max().unwrap_or(0).max(latest);
        let found = segments.filter(|(epoch, id)| !is_known(*id, &place_of(*epoch)));
        for one in found {
            if unknown.len() >= UNKNOWN_MOST {
                more = true;
                break;
            }
            unknown.insert(one);
        }
        Ok(())
    })?;
    if more {
        tracing::warn!(
            "more than {UNKNOWN_MOST} objects in the bucket belong to no state: the next import removes the others"
        );
    }
    let segments = unknown.into_iter().map(|(epoch, id)| (id, place_of(epoch))).collect();
    Ok(Unknown { segments, latest })
}

/// Whether a later writer may plausibly have this epoch: other programs may put objects with any name.
pub(super) fn is_near(since: u32, epoch: u32) -> bool {
    (since..=since.saturating_add(EPOCHS_AHEAD_MOST)).contains(&epoch)
}

/// The epoch and the number in a segment's name.
fn segment_of(key: &str) -> Option<(u32, u32)> {
    let (epoch, id) = key.rsplit_once('/')?.1.split_once('-')?;
    Some((epoch.parse().ok()?, id.parse().ok()?))
}

fn is_own(key: &str) -> bool {
    let is_number = |text: &str, radix| !text.is_empty() && text.chars().all(|one| one.is_digit(radix));
    match key.split('/').collect::<Vec<_>>().as_slice() {
        ["pool" | "roots" | "epochs" | "erase", number] => is_number(number, 10),
        ["probe", nonce] => is_number(nonce, 16),
        ["log", position, sequence] => is_number(position, 10) && is_number(sequence, 10),
        ["seg", low, name] => {
            let (epoch, id) = name.split_once('-').unwrap_or_default();
            is_number(low, 16) && is_number(epoch, 10) && is_number(id, 10)
        }
        _ => false,
    }
}
