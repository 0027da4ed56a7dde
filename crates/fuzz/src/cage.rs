//! The saved accounts of a cage: `docs/cage-state.md`.

use nacre_cage::saved::fuzz;

/// Decodes the body of a checkpoint; its header is made to fit.
pub fn cage_checkpoint(data: &[u8]) {
    fuzz::checkpoint(data);
}

/// Decodes a log of touched files: pieces, each after its length in two bytes, become records with
/// valid checksums; the remainder follows unchanged.
pub fn cage_log(data: &[u8]) {
    let (mut records, mut rest) = (Vec::new(), data);
    while let Some((length, after)) = rest.split_first_chunk::<2>()
        && let Some((record, after)) = after.split_at_checked(usize::from(u16::from_le_bytes(*length)))
    {
        records.push(record);
        rest = after;
    }
    fuzz::log(&records, rest);
}
