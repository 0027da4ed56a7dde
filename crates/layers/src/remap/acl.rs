//! The extended attributes that hold POSIX ACLs, and their rewriting. Pure.
//!
//! The kernel's format (`linux/posix_acl_xattr.h`), little-endian:
//! ```text
//!  0        4      6      8          12
//!  version  tag    perm   id         tag ...
//!  u32 = 2  u16    u16    u32        8 bytes per entry
//! ```
//! Invariant: nothing here changes the size of a value, so a reported size stays valid.

use nacre_vfs::{Errno, Result};

/// The ACL that access is checked with.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// The ACL that new objects in a directory inherit.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const HEADER: usize = 4;
const ENTRY: usize = 8;
const VERSION: u32 = 2;

/// Subject of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// The owner.
    Owner,
    /// The user with the entry's id.
    User,
    /// The owning group.
    OwningGroup,
    /// The group with the entry's id.
    Group,
    /// The maximum that users, groups and the owning group get.
    Mask,
    /// All other users.
    Other,
}

impl Tag {
    const fn from_raw(raw: u16) -> Option<Tag> {
        Some(match raw {
            0x01 => Tag::Owner,
            0x02 => Tag::User,
            0x04 => Tag::OwningGroup,
            0x08 => Tag::Group,
            0x10 => Tag::Mask,
            0x20 => Tag::Other,
            _ => return None,
        })
    }
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Subject of the entry.
    pub tag: Tag,
    /// r 4, w 2, x 1.
    pub perm: u16,
    /// User or group id; meaningless for the other tags.
    pub id: u32,
}

/// Whether an extended attribute holds an ACL.
pub fn is_acl(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

/// Calls `change` for each entry in place.
///
/// # Errors
/// EINVAL for a value that is no ACL, and the errors of `change`.
pub fn for_each(value: &mut [u8], mut change: impl FnMut(&mut Entry) -> Result<()>) -> Result<()> {
    // An empty value removes the ACL.
    if value.is_empty() {
        return Ok(());
    }
    let (version, entries) = value.split_first_chunk_mut::<HEADER>().ok_or(Errno::EINVAL)?;
    if u32::from_le_bytes(*version) != VERSION || entries.len() % ENTRY != 0 {
        return Err(Errno::EINVAL);
    }
    for bytes in entries.chunks_exact_mut(ENTRY) {
        let &mut [tag_low, tag_high, perm_low, perm_high, a, b, c, d] = bytes else {
            return Err(Errno::EINVAL);
        };
        let tag = Tag::from_raw(u16::from_le_bytes([tag_low, tag_high])).ok_or(Errno::EINVAL)?;
        let mut entry =
            Entry { tag, perm: u16::from_le_bytes([perm_low, perm_high]), id: u32::from_le_bytes([a, b, c, d]) };
        change(&mut entry)?;
        let [perm_low, perm_high] = entry.perm.to_le_bytes();
        let [a, b, c, d] = entry.id.to_le_bytes();
        bytes.copy_from_slice(&[tag_low, tag_high, perm_low, perm_high, a, b, c, d]);
    }
    Ok(())
}

/// Translates the ids of named users and groups.
///
/// # Errors
/// EINVAL for a value that is no ACL, and the errors of the translations.
pub fn translate(
    value: &mut [u8],
    user: impl Fn(u32) -> Result<u32>,
    group: impl Fn(u32) -> Result<u32>,
) -> Result<()> {
    for_each(value, |entry| {
        match entry.tag {
            Tag::User => entry.id = user(entry.id)?,
            Tag::Group => entry.id = group(entry.id)?,
            Tag::Owner | Tag::OwningGroup | Tag::Mask | Tag::Other => {}
        }
        Ok(())
    })
}

/// The nine permission bits of a file with this ACL; `None` for an empty value.
///
/// # Errors
/// EINVAL for a value that is no ACL.
pub fn mode(value: &[u8]) -> Result<Option<u32>> {
    let (mut owner, mut group, mut mask, mut other) = (0, 0, None, 0);
    for_each(&mut value.to_vec(), |entry| {
        let perm = u32::from(entry.perm & 7);
        match entry.tag {
            Tag::Owner => owner = perm,
            Tag::OwningGroup => group = perm,
            Tag::Mask => mask = Some(perm),
            Tag::Other => other = perm,
            Tag::User | Tag::Group => {}
        }
        Ok(())
    })?;
    Ok((!value.is_empty()).then_some(owner << 6 | mask.unwrap_or(group) << 3 | other))
}

/// Rewrites the permissions of an ACL as `rule` rewrites a mode, so that the two stay consistent:
/// the owner's entry by the u bits, the entry of all other users by the o bits, and each other
/// entry (named users and groups, the owning group, the mask) by the g bits.
///
/// # Errors
/// EINVAL for a value that is no ACL.
pub fn rewrite(value: &mut [u8], rule: impl Fn(u32) -> u32) -> Result<()> {
    let Some(before) = mode(value)? else {
        return Ok(());
    };
    for_each(value, |entry| {
        let bits = match entry.tag {
            Tag::Owner => rule(before) >> 6,
            Tag::Other => rule(before),
            Tag::User | Tag::OwningGroup | Tag::Group | Tag::Mask => {
                rule(before & 0o707 | u32::from(entry.perm & 7) << 3) >> 3
            }
        };
        entry.perm = u16::try_from(bits & 7).map_err(|_| Errno::EINVAL)?;
        Ok(())
    })
}

/// Writes the nine bits of a mode into an ACL, like `chmod(2)`: owner, mask (without one: owning
/// group), others.
///
/// # Errors
/// EINVAL for a value that is no ACL.
pub fn apply_mode(value: &mut [u8], mode: u32) -> Result<()> {
    with_classes(value, |entry, bits| entry.perm = bits, mode)
}

/// Removes from an ACL the permissions that a mode does not grant, like a creation with this mode
/// that inherits the ACL.
///
/// # Errors
/// EINVAL for a value that is no ACL.
pub fn limit_to_mode(value: &mut [u8], mode: u32) -> Result<()> {
    with_classes(value, |entry, bits| entry.perm &= bits, mode)
}

/// Calls `change` for the three entries that correspond to the bits of a mode.
fn with_classes(value: &mut [u8], change: impl Fn(&mut Entry, u16), mode: u32) -> Result<()> {
    let mut masked = false;
    for_each(&mut value.to_vec(), |entry| {
        masked |= entry.tag == Tag::Mask;
        Ok(())
    })?;
    for_each(value, |entry| {
        let shift = match entry.tag {
            Tag::Owner => 6,
            Tag::Mask => 3,
            Tag::OwningGroup if !masked => 3,
            Tag::Other => 0,
            Tag::User | Tag::Group | Tag::OwningGroup => return Ok(()),
        };
        // Three bits fit.
        change(entry, ((mode >> shift) & 7) as u16);
        Ok(())
    })
}

/// Whether an ACL can be expressed by the nine bits of a mode (the empty value cannot).
///
/// # Errors
/// EINVAL for a value that is no ACL.
pub fn is_minimal(value: &[u8]) -> Result<bool> {
    let mut minimal = true;
    for_each(&mut value.to_vec(), |entry| {
        minimal &= !matches!(entry.tag, Tag::User | Tag::Group | Tag::Mask);
        Ok(())
    })?;
    Ok(minimal)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::remap::perms::Perms;

    /// An ACL in the kernel's form.
    pub(crate) fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(perm.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    }

    pub(in crate::remap) const NONE: u32 = u32::MAX;

    #[test]
    fn only_named_entries_are_translated() {
        let mut value = acl(&[(1, 7, NONE), (2, 6, 1000), (4, 5, NONE), (8, 4, 1000), (16, 7, NONE), (32, 0, NONE)]);
        translate(&mut value, |id| Ok(id + 1), |id| Ok(id + 2)).unwrap();
        assert_eq!(value, acl(&[(1, 7, NONE), (2, 6, 1001), (4, 5, NONE), (8, 4, 1002), (16, 7, NONE), (32, 0, NONE)]));
        assert_eq!(translate(&mut value, |_| Err(Errno::EOVERFLOW), Ok), Err(Errno::EOVERFLOW));
    }

    #[test]
    fn values_that_are_no_acl_are_refused() {
        for mut value in [vec![2, 0, 0], vec![1, 0, 0, 0], vec![2, 0, 0, 0, 1], acl(&[(3, 7, 0)])] {
            assert_eq!(translate(&mut value, Ok, Ok), Err(Errno::EINVAL), "{value:?}");
        }
        assert_eq!(translate(&mut [], Ok, Ok), Ok(()));
        assert_eq!(mode(&[]), Ok(None));
    }

    #[test]
    fn the_mode_comes_from_the_mask_where_there_is_one() {
        assert_eq!(mode(&acl(&[(1, 7, NONE), (4, 5, NONE), (32, 1, NONE)])), Ok(Some(0o751)));
        assert_eq!(mode(&acl(&[(1, 6, NONE), (2, 7, 5), (4, 5, NONE), (16, 4, NONE), (32, 0, NONE)])), Ok(Some(0o640)));
    }

    #[test]
    fn permission_rules_reach_every_entry() {
        let rule: Perms = "a-w:o=".parse().unwrap();
        let mut value = acl(&[(1, 7, NONE), (2, 6, 5), (4, 7, NONE), (8, 3, 6), (16, 7, NONE), (32, 7, NONE)]);
        rewrite(&mut value, |mode| rule.apply(mode, false)).unwrap();
        assert_eq!(value, acl(&[(1, 5, NONE), (2, 4, 5), (4, 5, NONE), (8, 1, 6), (16, 5, NONE), (32, 0, NONE)]));
        assert_eq!(mode(&value), Ok(Some(rule.apply(0o777, false))), "ACL and mode agree");
    }
}
