//! Properties of owners: `userquota@NAME`, `groupobjused@NAME`. The caller resolves names; the
//! catalog stores the numeric id.

use super::{PropertyError, size};
use crate::rows::OwnerKind;

/// A statistic or limit of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OwnerFigure {
    /// Used space, bytes.
    Used,
    /// Number of inodes.
    ObjectsUsed,
    /// Limit of used space.
    Quota,
    /// Limit of the number of inodes.
    ObjectQuota,
}

/// A property of an owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnerProperty {
    /// User or group.
    pub kind: OwnerKind,
    /// The statistic or limit.
    pub figure: OwnerFigure,
    /// The owner as the user wrote it: a name or a number.
    pub owner: String,
}

const NAMES: [(&str, OwnerKind, OwnerFigure); 8] = [
    ("userused", OwnerKind::User, OwnerFigure::Used),
    ("userobjused", OwnerKind::User, OwnerFigure::ObjectsUsed),
    ("userquota", OwnerKind::User, OwnerFigure::Quota),
    ("userobjquota", OwnerKind::User, OwnerFigure::ObjectQuota),
    ("groupused", OwnerKind::Group, OwnerFigure::Used),
    ("groupobjused", OwnerKind::Group, OwnerFigure::ObjectsUsed),
    ("groupquota", OwnerKind::Group, OwnerFigure::Quota),
    ("groupobjquota", OwnerKind::Group, OwnerFigure::ObjectQuota),
];

impl OwnerProperty {
    /// Parses a name with `@`; `None` for another property.
    ///
    /// # Errors
    /// [`PropertyError::BadOwner`] for a missing owner, [`PropertyError::Unserved`] for projects.
    pub fn parse(name: &str) -> Result<Option<Self>, PropertyError> {
        let Some((figure, owner)) = name.split_once('@') else { return Ok(None) };
        if figure.starts_with("project") {
            return Err(PropertyError::Unserved("projectquota@", "there are no projects"));
        }
        let Some((_, kind, figure)) = NAMES.iter().find(|(known, _, _)| *known == figure) else { return Ok(None) };
        let fits = !owner.is_empty()
            && owner.len() <= 255
            && !owner.contains(['@', '/', ':', ','])
            && !owner.chars().any(char::is_control);
        if !fits {
            return Err(PropertyError::BadOwner(name.to_owned()));
        }
        Ok(Some(Self { kind: *kind, figure: *figure, owner: owner.to_owned() }))
    }

    /// The numeric id, if the owner was given as one.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.owner.parse().ok()
    }

    /// The name under which the limit of this id is stored.
    #[must_use]
    pub fn stored_name(&self, id: u32) -> String {
        let name = NAMES
            .iter()
            .find(|(_, kind, figure)| (*kind, *figure) == (self.kind, self.figure))
            .map_or("", |(name, _, _)| name);
        format!("{name}@{id}")
    }

    /// Parses a limit into its canonical value; 0 is none.
    ///
    /// # Errors
    /// The reason why it is refused.
    pub fn parse_value(&self, text: &str) -> Result<String, PropertyError> {
        match self.figure {
            OwnerFigure::Used | OwnerFigure::ObjectsUsed => Err(PropertyError::ReadOnly("userused@")),
            OwnerFigure::Quota | OwnerFigure::ObjectQuota if text == "none" => Ok("0".to_owned()),
            OwnerFigure::Quota | OwnerFigure::ObjectQuota => match size::parse(text)? {
                0 => Err(PropertyError::ZeroLimit("userquota/groupquota")),
                limit => Ok(limit.to_string()),
            },
        }
    }

    /// Formats a canonical value for display.
    #[must_use]
    pub fn human(&self, value: &str) -> String {
        match self.figure {
            OwnerFigure::Quota | OwnerFigure::ObjectQuota if value == "0" => "none".to_owned(),
            OwnerFigure::Used | OwnerFigure::Quota => size::human_bytes_of(value),
            OwnerFigure::ObjectsUsed | OwnerFigure::ObjectQuota => {
                value.parse().map_or_else(|_| value.to_owned(), size::human)
            }
        }
    }
}
