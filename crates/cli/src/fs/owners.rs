//! Names and ids of this system's users and groups, in properties and tables.

use nacre_daemon::failure::Failure;
use nacre_layers::accounts;
use nacre_pool::{
    properties::{Property, dataset_property},
    rows::OwnerKind,
};
use std::collections::HashMap;

/// Replaces an owner's name in a property's name by the id: `userquota@alice` becomes
/// `userquota@1000`. Other names are returned unchanged.
///
/// # Errors
/// No such user or group.
pub fn resolved(name: &str) -> Result<String, Failure> {
    let Ok(Property::Owner(owner)) = dataset_property(name) else { return Ok(name.to_owned()) };
    let system = nacre_layers::system::SystemAccounts;
    let id = match owner.kind {
        OwnerKind::User => accounts::user_id(&system, &owner.owner),
        OwnerKind::Group => accounts::group_id(&system, &owner.owner),
    };
    id.map(|id| owner.stored_name(id)).map_err(Failure::new)
}

/// Cache of names by id: each is looked up once.
#[derive(Debug, Default)]
pub struct Names(HashMap<(bool, u32), String>);

impl Names {
    /// Returns the name of a user or group; its id where it has none.
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
