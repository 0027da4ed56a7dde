//! The table `object`: file systems in a bucket of a remote object store.

use nacre_bench_arguments as arguments;

use super::pool::{IMAGE, NACRE};
use super::{Table, Test, bytes, count, operations};
use crate::table::Group;
use crate::target::{Bucket, BucketOf, Step, Target};

/// Pools in a bucket and JuiceFS (metadata in SQLite on this machine), with an S3 server on this machine and a
/// simulated round trip of 5, 10 or 50 ms, and the throughput of curl with that server. Ratios refer to a pool in
/// an image file.
pub static OBJECT: Table = Table {
    arguments: arguments::OBJECT,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &[
        "nacre-pool",
        "nacre-5",
        "nacre-10",
        "nacre-50",
        "juicefs-5",
        "juicefs-10",
        "juicefs-50",
        "curl-5",
        "curl-10",
        "curl-50",
    ],
    programs: &[("versitygw", "--version"), ("juicefs", "--version"), ("curl", "--version"), ("git", "--version")],
};

const fn bucket(by: BucketOf, delay: u64) -> Step {
    Step::Bucket(Bucket { by, delay })
}

const BUCKETS: Target = Target { baseline: "nacre-pool", ..IMAGE };

static TARGETS: &[Target] = &[
    Target { id: "nacre-pool", title: "nacre, local", steps: &[NACRE], ..BUCKETS },
    Target { id: "nacre-0", title: "nacre", steps: &[bucket(BucketOf::Nacre, 0)], ..BUCKETS },
    Target { id: "nacre-5", title: "nacre, 5 ms", steps: &[bucket(BucketOf::Nacre, 5)], ..BUCKETS },
    Target { id: "nacre-10", title: "nacre, 10 ms", steps: &[bucket(BucketOf::Nacre, 10)], ..BUCKETS },
    Target { id: "nacre-50", title: "nacre, 50 ms", steps: &[bucket(BucketOf::Nacre, 50)], ..BUCKETS },
    Target { id: "juicefs-0", title: "JuiceFS", steps: &[bucket(BucketOf::JuiceFs, 0)], ..BUCKETS },
    Target { id: "juicefs-5", title: "JuiceFS, 5 ms", steps: &[bucket(BucketOf::JuiceFs, 5)], ..BUCKETS },
    Target { id: "juicefs-10", title: "JuiceFS, 10 ms", steps: &[bucket(BucketOf::JuiceFs, 10)], ..BUCKETS },
    Target { id: "juicefs-50", title: "JuiceFS, 50 ms", steps: &[bucket(BucketOf::JuiceFs, 50)], ..BUCKETS },
    Target { id: "curl-0", title: "curl", steps: &[bucket(BucketOf::Curl, 0)], ..BUCKETS },
    Target { id: "curl-5", title: "curl, 5 ms", steps: &[bucket(BucketOf::Curl, 5)], ..BUCKETS },
    Target { id: "curl-10", title: "curl, 10 ms", steps: &[bucket(BucketOf::Curl, 10)], ..BUCKETS },
    Target { id: "curl-50", title: "curl, 50 ms", steps: &[bucket(BucketOf::Curl, 50)], ..BUCKETS },
];

static TESTS: &[Test] = &[
    operations("object-create", "small files created, and synced", Group::InBucket, true),
    operations("object-untar", "a tree unpacked by tar, and synced", Group::InBucket, true),
    operations("object-git-first", "git status, cold", Group::InBucket, true),
    operations("object-git-again", "again", Group::InBucket, true),
    operations("object-fsync", "append 4 KiB and fsync", Group::InBucket, true),
    bytes("object-write", "a file written, and synced", Group::InBucket, true),
    bytes("object-read-first", "read, cold", Group::InBucket, true),
    bytes("object-read-again", "again", Group::InBucket, true),
    bytes("object-read-kept", "again, forgotten by the kernel", Group::InBucket, true),
    operations("object-random-write", "random overwrites of 4 KiB, one fsync", Group::InBucket, true),
    operations("object-random-first", "random reads of 4 KiB, cold", Group::InBucket, true),
    operations("object-random-again", "again", Group::InBucket, true),
    operations("object-random-kept", "again, forgotten by the kernel", Group::InBucket, true),
    operations("object-many-create", "created, and synced", Group::ManyInBucket, true),
    operations("object-many-first", "ls -lht, cold", Group::ManyInBucket, true),
    operations("object-many-again", "again", Group::ManyInBucket, true),
    count("object-many-objects", "objects below seg/ when they were made", Group::ManyInBucket, true),
    count("object-many-rest", "objects below seg/ when it rests (--full)", Group::ManyInBucket, true),
    count("object-many-import", "milliseconds of an import", Group::ManyInBucket, true),
    count("object-many-listing", "milliseconds of ls -lht, cold", Group::ManyInBucket, true),
    count("object-many-follow", "milliseconds until a reader sees a commit", Group::ManyInBucket, true),
];
