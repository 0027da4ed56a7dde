//! `nacre pool destroy` of a pool in a bucket that is destroyed already, and of which objects are still there: the
//! process that removed them was killed, or the store refused to.
//!
//! Called by `run.rs` and `importing.rs`. Invariant: nothing is removed of a pool whose newest identity does not say
//! that it is destroyed.

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

/// Shows how far the removal is.
struct Shown;

impl Progress for Shown {
    fn note(&mut self, line: &str) -> bool {
        tell(&printable(line.as_bytes()));
        true
    }
}

/// Removes what is left of the destroyed pool at an address, or of the one of this name that was imported on this
/// machine. `false`: the name is that of another pool, or of none.
///
/// # Errors
/// The store cannot be reached, or refuses; at the address is no destroyed pool.
pub fn remove_rest(wanted: &str) -> Result<bool, Failure> {
    let is_address = nacre_remote::is_address(Path::new(wanted));
    // At a place that is only remembered another pool may lie by now.
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
                known::forget(pool);
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
