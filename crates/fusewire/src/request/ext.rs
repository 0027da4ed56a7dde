//! Extensions at the end of creating requests: supplementary groups and security contexts.
//!
//! Called by `parse` and by handlers that chose them in INIT. Both types are checked when created, so that iterating
//! cannot fail.

use crate::abi::{ExtHeader, Pod, Secctx, SecctxHeader, SuppGroups, ext};

/// Supplementary groups of the caller that matter for this creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups<'a>(&'a [u8]);

impl Groups<'_> {
    /// The group ids.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.as_chunks::<4>().0.iter().map(|id| u32::from_ne_bytes(*id))
    }
}

/// Security contexts for a new file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecurityContexts<'a>(&'a [u8]);

impl<'a> SecurityContexts<'a> {
    /// Name of the extended attribute (without NUL) and value, for each.
    pub fn iter(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (name, value, after) = context(rest)?;
            rest = after;
            Some((name, value))
        })
    }
}

/// Splits the first security context off: name, value, remainder.
fn context(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let head = Secctx::read(bytes)?;
    let body = bytes.get(size_of::<Secctx>()..)?;
    let end = body.iter().position(|byte| *byte == 0)?;
    let name = body.get(..end)?;
    let value_end = (end + 1).checked_add(head.size as usize)?;
    let value = body.get(end + 1..value_end)?;
    // Each context starts at a multiple of 8 bytes; the last may end without its padding.
    let next = (size_of::<Secctx>() + value_end).next_multiple_of(8).min(bytes.len());
    Some((name, value, bytes.get(next..)?))
}

/// Parses the extension area; `None` if a length does not fit. Unknown types are skipped.
pub(crate) fn extensions(mut bytes: &[u8]) -> Option<(Groups<'_>, SecurityContexts<'_>)> {
    let (mut groups, mut security) = (Groups::default(), SecurityContexts::default());
    while !bytes.is_empty() {
        let head = ExtHeader::read(bytes)?;
        let size = head.size as usize;
        if size < size_of::<ExtHeader>() {
            return None;
        }
        let body = bytes.get(size_of::<ExtHeader>()..size)?;
        if head.r#type <= ext::MAX_NR_SECCTX {
            security = contexts(body, SecctxHeader { size: head.size, nr_secctx: head.r#type })?;
        } else if head.r#type == ext::GROUPS {
            let count = SuppGroups::read(body)?.nr_groups as usize;
            groups = Groups(body.get(4..count.checked_mul(4)?.checked_add(4)?)?);
        }
        bytes = bytes.get(size.next_multiple_of(8).min(bytes.len())..)?;
    }
    Some((groups, security))
}

/// Checks that there are as many contexts as the header has, and keeps exactly those.
fn contexts(body: &[u8], header: SecctxHeader) -> Option<SecurityContexts<'_>> {
    let mut rest = body;
    for _ in 0..header.nr_secctx {
        rest = context(rest)?.2;
    }
    Some(SecurityContexts(body.get(..body.len() - rest.len())?))
}
