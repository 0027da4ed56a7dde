//! An import that is refused leaves its devices as they were.

use super::*;
use crate::device::{Device, Simulator};
use crate::store::{Access, Import, NewPool, Store};

/// Length of the blocks that are damaged one after the other, if they hold anything, bytes.
const BLOCK: usize = 4096;

fn open(device: &Arc<Simulator>, access: Access) -> Result<(Store, Durable), PoolError> {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let (store, root) = Store::open(devices, &Import { access, name: None, host: (2, "there".to_owned()), time: 2 })?;
    Ok((store, Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() }))
}

fn pool_in(store: Store, durable: &Durable) -> Result<Pool, PoolError> {
    let (store, empty) = (Arc::new(store), Arc::new(MapStorage::default()));
    Pool::open(PoolConfig { log: Some(store.log()?), storage: store, ..config(&empty) }, durable)
}

#[test]
fn an_import_that_is_refused_writes_nothing() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let host = (1, "here".to_owned());
    let new = NewPool { name: "tank".to_owned(), guid: 7, host, time: 1, redundant_metadata: false };
    let store = Arc::new(Store::create(vec![Arc::clone(&device) as Arc<dyn Device>], &new).unwrap().0);
    let empty = Arc::new(MapStorage::default());
    let config = PoolConfig { log: Some(store.log().unwrap()), storage: store, ..config(&empty) };
    let pool = Pool::create(config, "tank").unwrap();
    let last = pool.commit().unwrap();
    drop(pool);
    let bytes = device.bytes();
    let holds = |at: &usize| bytes[*at..*at + BLOCK].iter().any(|byte| *byte != 0);
    let mut refused = 0;
    for at in (0..bytes.len()).step_by(BLOCK).filter(holds) {
        for access in [Access::ReadWrite, Access::Rewind(last)] {
            let disk = Arc::new(device.copy());
            disk.overwrite(at as u64, &[0xa5; BLOCK]);
            let error = match open(&disk, access) {
                Err(error) => error,
                Ok((store, durable)) => match pool_in(store, &durable) {
                    Ok(_) => continue,
                    Err(error) => {
                        refused += 1;
                        error
                    }
                },
            };
            assert_eq!(disk.operations(), 0, "damage at {at}, {access:?}: {error}");
        }
    }
    assert!(refused >= 2, "the catalog was never damaged");
    // An import that is not refused notes the importing host.
    let (store, durable) = open(&device, Access::ReadWrite).unwrap();
    pool_in(store, &durable).unwrap();
    let identity = crate::label::probe(&*device).unwrap().unwrap();
    assert_eq!(identity.host, (2, "there".to_owned()));
}
