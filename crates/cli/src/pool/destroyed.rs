//! `nacre pool destroy` of a pool in a bucket that is destroyed already while some of its objects
//! still exist: the process that removed them was killed, or the store refused to.
//!
//! Called by `run.rs` and `importing.rs`. Invariant: no object is removed unless the newest
//! identity of its pool is in the state "destroyed".

use super::{find, starting};
use nacre_admin::{
    Progress,
    pool::{
        devices::{self, Opened},
        in_bucket::{self, Remains},
    },
};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::{client, known, process},
    report::{printable, tell},
};
use nacre_pool::label::PoolState;
use std::path::{Path, PathBuf};

/// Shows the progress of the removal.
struct Shown;

impl Progress for Shown {
    fn note(&mut self, line: &str) -> bool {
        tell(&printable(line.as_bytes()));
        true
    }
}

/// Removes the remaining objects of the destroyed pool at an address, or of the pool of this name
/// that was imported on this machine. Returns `false` where the name is that of another pool, or of
/// none.
///
/// # Errors
/// The store cannot be reached, or refuses; there is no destroyed pool at the address.
pub fn remove_rest(wanted: &str) -> Result<bool, Failure> {
    let is_address = nacre_remote::is_address(Path::new(wanted));
    // Another pool may be at a remembered address by now.
    let places: Vec<(PathBuf, Option<u64>)> = match is_address {
        true => vec![(PathBuf::from(wanted), None)],
        false if client::find(wanted).is_some() => Vec::new(),
        false => known::numbered_places_of(wanted).into_iter().map(|(place, pool)| (place, Some(pool))).collect(),
    };
    for (place, known) in places.iter().filter(|(place, _)| nacre_remote::is_address(place)) {
        let Opened::Bucket(bucket, address) = devices::open_bucket(place).map_err(starting::failed)? else { continue };
        match in_bucket::find(&*bucket).map_err(starting::failed)? {
            Some(there) if known.is_some_and(|known| known != there.pool) => {}
            Some(there) if there.state == PoolState::Destroyed => {
                let state = process::state_directory();
                let (bucket, address, pool, state) = (&*bucket, address.as_str(), there.pool, state.as_deref());
                let rest = Remains { bucket, address, pool, name: wanted, state };
                rest.remove(&mut Shown).map_err(starting::failed)?;
                known::forget(pool, &[PathBuf::from(address)]);
                return Ok(true);
            }
            Some(there) if is_address => {
                let (at, name) = (find::shown(place), printable(there.name.as_bytes()));
                return Err(Failure::new(format!("cannot destroy '{at}': it holds pool '{name}'"))
                    .next(format!("import it, then destroy it by its name: `nacre pool destroy {name}`")));
            }
            None if is_address => {
                let what = format!("cannot destroy '{}': there is no pool", find::shown(place));
                return Err(Failure::new(what).exit(Exit::NotFound));
            }
            Some(_) | None => {}
        }
    }
    Ok(false)
}
