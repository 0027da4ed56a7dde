//! Users and groups of this system, in properties and tables.

use nacre_daemon::failure::Failure;
use nacre_layers::accounts;
use nacre_pool::{
    properties::{Property, dataset_property},
    rows::OwnerKind,
};
use std::collections::HashMap;

/// A property's name with the number of an owner in the place of a name: `userquota@alice` is
/// `userquota@1000`. Other names stay.
///
/// # Errors
/// There is no such user or group.
pub fn resolved(name: &str) -> Result<String, Failure> {
    let Ok(Property::Owner(owner)) = dataset_property(name) else { return Ok(name.to_owned()) };
    let system = nacre_layers::system::SystemAccounts;
    let id = match owner.kind {
        OwnerKind::User => accounts::user_id(&system, &owner.owner),
        OwnerKind::Group => accounts::group_id(&system, &owner.owner),
    };
    id.map(|id| owner.stored_name(id)).map_err(Failure::new)
}

/// Names by their numbers, each asked for once.
#[derive(Debug, Default)]
pub struct Names(HashMap<(bool, u32), String>);

impl Names {
    /// The name of a user or group; its number where it has none.
    pub fn of(&mut self, group: bool, id: u32) -> String {
        let name = || {
            let found = match group {
                true => nacre_sys::accounts::group_by_id(id).ok().flatten().map(|group| group.name),
                false => nacre_sys::accounts::user_by_id(id).ok().flatten().map(|user| user.name),
            };
            found.map_or_else(|| id.to_string(), |name| String::from_utf8_lossy(&name).into_owned())
        };
        self.0.entry((group, id)).or_insert_with(name).clone()
    }
}
