//! Targets of encrypted pools: sealed frames and nodes, and the rows of keys.

use nacre_pool::catalog::key_rows::{FamilyRow, KeyRootRow, MasterKeyRow, SealRow, SlotRow, erasable_sequence};
use nacre_pool::crypt::{ADDRESS, PORTABLE, PREFIX, ShortNode, StoredForm};
use nacre_pool::label::ErasableBlock;
use nacre_pool::{FrameKind, checksum};

/// Decodes the stored bytes of a sealed frame with the lists of its children, then restores a node from the content
/// behind them and those children; or shortens the content of a node. What is restored is shortened to the same.
pub fn sealed_node(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    let kind = match kind % 5 {
        0 => FrameKind::Data,
        1 => FrameKind::Value,
        2 => FrameKind::Leaf,
        3 => FrameKind::Inner,
        _ => {
            if let Ok(short) = ShortNode::new(bytes) {
                stable(&short);
            }
            return;
        }
    };
    let Ok(form) = StoredForm::decode(kind, bytes) else { return };
    let Ok(children) = form.children() else { return };
    // As if the body were not encrypted: the length of the packed content, another one, and the content.
    let body = bytes.get(PREFIX + children.len() * (PORTABLE + ADDRESS)..).unwrap_or_default();
    let Some((length, body)) = body.split_first_chunk::<4>() else { return };
    let end = (u32::from_le_bytes(*length) as usize).saturating_add(4);
    let content = body.get(4..end).unwrap_or_default().to_vec();
    stable(&ShortNode { height: form.height, children, content });
}

fn stable(short: &ShortNode) {
    if let Ok(content) = short.restore() {
        let again = ShortNode::new(&content);
        assert!(again.is_ok_and(|again| again.restore().is_ok_and(|restored| restored == content)));
    }
}

macro_rules! stays {
    ($row:ty, $bytes:expr) => {
        if let Ok(row) = <$row>::decode($bytes) {
            assert!(<$row>::decode(&row.encode()).is_ok_and(|read| read == row), "{row:?}");
        }
    };
}

/// Decodes a row of keys or a block of erasable keys, which the first byte selects, and encodes it again.
pub fn key_rows(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    match kind % 7 {
        0 => stays!(KeyRootRow, bytes),
        1 => stays!(SlotRow, bytes),
        2 => stays!(FamilyRow, bytes),
        3 => stays!(MasterKeyRow, bytes),
        4 => stays!(SealRow, bytes),
        5 => drop(erasable_sequence(bytes)),
        _ => erasable_block(bytes),
    }
}

/// Decodes a block of erasable keys of a label, with a right magic number and checksum, and encodes it again.
fn erasable_block(data: &[u8]) {
    const HEAD: usize = 24;
    let mut body = data.to_vec();
    body.resize(4096 - HEAD, 0);
    let block = [b"nacreERA".as_slice(), &checksum::structure(&body), &body].concat();
    if let Ok(found) = ErasableBlock::decode(&block) {
        assert!(found.is_some_and(|found| found.encode().is_ok_and(|encoded| **encoded == *block)));
    }
}
