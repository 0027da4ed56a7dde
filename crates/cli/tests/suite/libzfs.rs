//! The Python module `libzfs`: the calls of cockpit-zfs' programs, on real pools.

use crate::mounting::{as_root, finish, nacre, needs, scratch, skip, text};
use serde_json::{Value, json};
use std::process::{Command, Output};

/// The calls of get-pools, get-datasets, get-snapshots, get-scan-stats and get-importable-pools of cockpit-zfs, as one
/// JSON document. Its arguments are the name of the pool, as those of other tests come and go meanwhile, and where
/// pools are looked for.
const CALLS: &str = r#"
import json, sys, libzfs
name, *places = sys.argv[1:]
def own(found):
    return [one for one in found if one.name.split("/")[0] == name]
with libzfs.ZFS() as zfs:
    pools = {pool.name: pool.asdict() for pool in own(zfs.pools)}
    datasets = {dataset.name: dataset.asdict() for dataset in own(zfs.datasets)}
    snapshots = {}
    for dataset in own(zfs.datasets):
        assert dataset.pool.name == dataset.name.split("/")[0]
        for snapshot in dataset.snapshots:
            values = {name: str(value.value) for name, value in snapshot.properties.items()}
            snapshots.setdefault(dataset.name, []).append([snapshot.name, values["guid"], values["used"]])
    try:
        missing = zfs.get_dataset("nosuch/dataset")
    except libzfs.ZFSException as error:
        missing = error.code.name
    importable = {pool.name: pool.asdict() for pool in own(zfs.find_import(search_paths=places))}
    destroyed = {pool.name: pool.asdict() for pool in own(zfs.find_import(destroyed="True", search_paths=places))}
print(json.dumps({"pools": pools, "datasets": datasets, "snapshots": snapshots, "missing": missing,
                  "importable": importable, "destroyed": destroyed}, default=str))
"#;

/// Pools as `zpool import` prints them, with the names of headings, and programs in the place of nacre that end with 1.
const PARTS: &str = r##"
import json, os, sys, libzfs
text = """  pool: logs
    id: 1
 state: ONLINE
action: The pool can be imported using its name or numeric identifier.
config:

\tlogs        ONLINE
\t  mirror-0  ONLINE
\t    /srv/a  ONLINE
\t    /srv/b  UNAVAIL  cannot open
\tlogs
\t  /srv/l    ONLINE
"""
pool = libzfs.ZFSImportablePool(None, "logs", next(libzfs._importable(text)))
assert pool.root_vdev.type == "root" and pool.root_vdev.status == "ONLINE", pool.root_vdev.asdict()
data, log = pool.groups["data"], pool.groups["log"]
assert [vdev.type for vdev in data] == ["mirror"] and data[0].disks == [], data
assert [(child.path, child.status) for child in data[0].children] == [("/srv/a", "ONLINE"), ("/srv/b", "UNAVAIL")]
assert [vdev.path for vdev in log] == ["/srv/l"], log

def answer(script):
    path = os.path.join(sys.argv[1], "program")
    with open(path, "w") as file:
        file.write("#!/bin/sh\n" + script)
    os.chmod(path, 0o755)
    os.environ["NACRE"] = path
    try:
        return [dataset.name for dataset in libzfs.ZFS().datasets]
    except libzfs.ZFSException as error:
        return str(error)
answered = json.dumps({"datasets": {"a": {"type": "FILESYSTEM", "properties": {}}}})
silent = "echo 'b: the pool does not answer' >&2; exit 1\n"
assert answer("echo '{}'; {}".format(answered, silent)) == ["a"]
assert answer(silent) == "b: the pool does not answer"
assert answer("echo '{\"datasets\": {}}'; " + silent) == "b: the pool does not answer"
assert "does not answer" in answer("echo '{\"datasets\": {'; " + silent)
assert "exited with -9" in answer("echo '{}'; kill -9 $$\n".format(answered[:20]))
"##;

#[test]
fn what_is_left_out_or_named_as_a_heading_hides_nothing() {
    if Command::new("python3").arg("-V").output().is_err() {
        skip("libzfs", "python3 is not installed");
        return;
    }
    let place = scratch();
    let output = python(place.path(), PARTS, &[place.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn python(place: &std::path::Path, program: &str, words: &[&str]) -> Output {
    let module = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/python");
    let mut command = Command::new("python3");
    command.args(["-B", "-W", "error", "-c", program]).args(words).env("PYTHONPATH", module);
    command.env("NACRE", nacre()).env("NACRE_STATE_DIR", place.join("state")).env("TZ", "UTC");
    finish(&mut command)
}

#[test]
fn the_calls_of_cockpit_zfs_are_answered() {
    needs!(as_root());
    if Command::new("python3").arg("-V").output().is_err() {
        skip("libzfs", "python3 is not installed");
        return;
    }
    let place = scratch();
    let at = place.path();
    let name = format!("libz{}", std::process::id());
    let run = |line: &str| {
        let words = line.split(' ').map(|word| word.replace('%', &name).replace('@', at.to_str().unwrap()));
        let mut command = Command::new(nacre());
        finish(command.args(words).env("NACRE_STATE_DIR", at.join("state")))
    };
    let done = |line: &str| {
        let output = run(line);
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    };
    let answers = || -> Value {
        let output = python(at, CALLS, &[&name, at.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let answers: Value = serde_json::from_slice(&output.stdout).unwrap();
        answers
    };
    done("pool create --size 128M -m @/tank % mirror @/a @/b log @/l spare @/s");
    done("fs create -o quota=50M %/x");
    done("fs create %/x/y");
    let snapshots = format!("{name}/x@2,{name}/x@1");
    for snapshot in snapshots.split(',') {
        assert!(finish(Command::new(nacre()).args(["fs", "snapshot", snapshot])).status.success());
    }
    done("pool scrub -w %");
    let found = answers();
    let pool = &found["pools"][&name];
    for (field, value) in [
        ("status", json!("ONLINE")),
        ("status_code", json!("OK")),
        ("healthy", json!(true)),
        ("error_count", json!(0)),
        ("id", json!(name)),
    ] {
        assert_eq!(pool[field], value, "{field}: {pool}");
    }
    assert!(pool["guid"].as_str().unwrap().parse::<u64>().is_ok() && pool["hostname"].is_string());
    assert_eq!(pool["properties"]["health"]["parsed"], "ONLINE");
    assert!(pool["properties"]["size"]["parsed"].as_u64().unwrap() > 100 << 20);
    assert_eq!(pool["properties"]["readonly"]["parsed"], false);
    assert_eq!((&pool["scan"]["function"], &pool["scan"]["state"]), (&json!("SCRUB"), &json!("FINISHED")));
    let mirror = &pool["groups"]["data"][0];
    assert_eq!((&mirror["name"], &mirror["type"]), (&json!("mirror-0"), &json!("mirror")));
    let disk = &mirror["children"][0];
    assert_eq!((disk["path"].as_str(), &disk["status"]), (at.join("a").to_str(), &json!("ONLINE")));
    assert_eq!(disk["stats"]["checksum_errors"], 0);
    assert!(disk["guid"].as_str().unwrap().parse::<u64>().is_ok());
    let length = |group: &str| pool["groups"][group].as_array().unwrap().len();
    let lengths = ["data", "log", "spare", "cache", "special", "dedup"].map(length);
    assert_eq!(lengths, [1, 1, 1, 0, 0, 0]);
    // File systems have those below in them, and stand for themselves as well.
    let root = &pool["root_dataset"];
    assert_eq!(root["children"][0]["children"][0]["name"], format!("{name}/x/y"));
    let x = &found["datasets"][&format!("{name}/x")];
    assert_eq!((&x["type"], &x["pool"], &x["encrypted"]), (&json!("FILESYSTEM"), &json!(name), &json!(false)));
    assert_eq!(x["mountpoint"].as_str(), at.join("tank/x").to_str());
    let quota = json!({ "value": "50M", "rawvalue": "52428800", "parsed": 50 << 20, "source": "LOCAL" });
    assert_eq!(x["properties"]["quota"], quota);
    assert_eq!(root["properties"]["quota"]["parsed"], Value::Null);
    let created = x["properties"]["creation"]["parsed"].as_str().unwrap();
    assert!(created.len() == 19 && created.starts_with("20"), "{created}");
    // The oldest first.
    let snapshots = &found["snapshots"][&format!("{name}/x")];
    let names = [&snapshots[0][0], &snapshots[1][0]];
    assert_eq!(names, [&json!(format!("{name}/x@2")), &json!(format!("{name}/x@1"))]);
    assert_eq!(found["missing"], "NOENT");
    // A device less is said, and a pool that is not there can be imported.
    done("pool offline % @/b");
    let pool = &answers()["pools"][&name];
    let state = (&pool["status"], &pool["status_code"], &pool["healthy"]);
    assert_eq!(state, (&json!("DEGRADED"), &json!("OFFLINE_DEV"), &json!(false)));
    assert!(pool["status_detail"].as_str().unwrap().contains("taken offline"), "{}", pool["status_detail"]);
    done("pool online % @/b");
    done("pool export %");
    let found = answers();
    assert!(found["pools"].get(&name).is_none() && found["destroyed"].get(&name).is_none());
    let pool = &found["importable"][&name];
    let mirror = &pool["groups"]["data"][0];
    assert_eq!((&pool["status"], &mirror["name"]), (&json!("ONLINE"), &json!("mirror-0")));
    assert_eq!(mirror["children"][1]["path"].as_str(), at.join("b").to_str());
    assert_eq!(pool["groups"]["log"][0]["path"].as_str(), at.join("l").to_str());
    done("pool import -d @ %");
    done("pool destroy %");
    let found = answers();
    assert!(found["importable"].get(&name).is_none() && found["destroyed"].get(&name).is_some(), "{found}");
    let nowhere = python(at, "import os, libzfs; os.environ['NACRE'] = '/nowhere'; list(libzfs.ZFS().pools)", &[]);
    assert!(text(&nowhere.stderr).contains("ZFSException: cannot run nacre"), "{}", text(&nowhere.stderr));
    crate::mounting::clear(at);
}
