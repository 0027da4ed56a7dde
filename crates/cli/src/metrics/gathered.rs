//! The current metrics of mounts, cages, unions and pools.
//!
//! Used by `nacre metrics`, once or for each HTTP request, and by `nacre top`.

use super::pools;
use crate::{cage, status, union};
use nacre_admin::pool::{PoolAnswer, PoolRequest, Status};
use nacre_daemon::{
    cage::{find, report::CageReport},
    failure::Failure,
    pool::{client, expected},
    report::{Report, printable},
    runtime::Whose,
};
use std::path::PathBuf;

/// The figures of mounts, pools and cages at one moment.
#[derive(Clone, Debug, Default)]
pub struct Everything {
    pub mounts: Vec<Report>,
    pub pools: Vec<Status>,
    pub cages: Vec<CageReport>,
}

impl Everything {
    /// Asks all mounts and pools, or these mounts alone. Those that do not answer in time are left
    /// out, and reported to the user where `told` is set.
    ///
    /// # Errors
    /// A mount point where nothing of ours is mounted.
    pub fn gather(mountpoints: &[PathBuf], everybody: bool, told: bool) -> Result<Everything, Failure> {
        let mounts = if told {
            status::gather(mountpoints, everybody)?
        } else {
            status::gather_silently(mountpoints, everybody)?
        };
        let mut cages: Vec<CageReport> = mounts.iter().flat_map(|report| report.cages.clone()).collect();
        let mut pools = Vec::new();
        if mountpoints.is_empty() {
            cages.extend(find::of_kernel()?);
            pools = of_pools(everybody, told);
        }
        Ok(Everything { mounts, pools, cages })
    }

    /// Returns the figures as Prometheus text.
    pub fn text(&self, up: &[(String, bool)]) -> String {
        let branches: Vec<_> = self.mounts.iter().flat_map(|report| report.branches.clone()).collect();
        pools::up(up)
            + &pools::text(&self.pools)
            + &super::text(&self.mounts)
            + &cage::metrics::text(&self.cages)
            + &union::metrics::text(&branches)
    }
}

/// Gathers the current figures as Prometheus text.
///
/// # Errors
/// As [`Everything::gather`].
pub fn text(mountpoints: &[PathBuf], everybody: bool, told: bool) -> Result<String, Failure> {
    let everything = Everything::gather(mountpoints, everybody, told)?;
    // Read last: the entry of a pool that is just being exported is gone by then.
    let up = if mountpoints.is_empty() { expected::there() } else { Vec::new() };
    Ok(everything.text(&up))
}

fn of_pools(everybody: bool, told: bool) -> Vec<Status> {
    let ask = |owned: &client::Owned| match owned.pool("", PoolRequest::Status { names: false }, &mut |_| {})? {
        PoolAnswer::Status(status) => Ok(*status),
        _ => Err(Failure::new("the process that owns a pool answers something else than was asked")),
    };
    let (mut pools, failures) = client::ask_each(client::all(&Whose::told(everybody)), ask);
    if told {
        failures.iter().for_each(|failure| nacre_daemon::report::tell(&format!("nacre: {failure}")));
    }
    for pool in &mut pools {
        pool.figures.devices.iter_mut().filter(|device| device.path.contains(char::is_control)).for_each(|device| {
            device.path = printable(device.path.as_bytes());
        });
    }
    pools.sort_by(|a, b| a.figures.name.cmp(&b.figures.name));
    pools
}
